"""1,000 random single-key mutations of valid files, judged as TensorRT-LLM's own manifests judge them.

The oracle is upstream's: the annotation and the allowed values that the manifest lists, run through pydantic, and the
options of the serve references. Our schema only helps to write the valid file that is then mutated.
"""

import random
import string
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.trtllm.test_upstream import NEWEST, SAMPLES, accepts, adapter, leaves, serve_options
from trtspec.trtllm.deployment import Deployment, parse_passed
from trtspec.trtllm.lint import lint
from trtspec.trtllm.rules.keys import check_value
from trtspec.trtllm.schema import DISCRIMINATORS, LINES, Field, line_fields, schema_for

OLDER = "1.3.0rc20"
KEY_CODES = {"TS-LINT-UNKNOWN-KEY", "TS-LINT-RENAMED-KEY", "TS-LINT-REMOVED-KEY", "TS-LINT-WRONG-TYPE",
             "TS-LINT-BAD-VALUE", "TS-LINT-OUT-OF-RANGE", "TS-LINT-WRONG-VARIANT"}  # fmt: skip
# Keys that the class of the manifest's own commit takes and the manifest leaves out, so that it cannot judge them. The
# text is tensorrt_llm/llmapi/llm_args.py at 0004396720054fd8e205cbf616f21f0b57c6b412:
# - KvCacheConfig: `mamba_state_cache_interval: Optional[NonNegativeInt] = Field(default=None, status="deprecated",
#   telemetry=False, exclude=True, description="Deprecated alias for mamba_state_config.periodic_snapshot_interval.")`;
#   Field's own words: "telemetry=False to opt a type-safe field out"; the manifest holds what telemetry captures
# - MoeConfig: `load_balancer: Optional[Union[object, str]]`, in its schema "Union[MoeLoadBalancerConfig, dict, str]";
#   MoeLoadBalancerConfig has `num_slots: Optional[int]`, `layer_updates_per_iter: int`, `initial_global_assignments`
NOT_LISTED = ("kv_cache_config.mamba_state_cache_interval", "moe_config.load_balancer")
# Keys for which the serve reference's `Choice(...)` counts beside the manifest's values, with what the manifest says of
# them: TorchLlmArgs is the class of the PyTorch backend alone, and an allowlist is what telemetry may report of a text
SERVED_CHOICES = {"backend": ("Literal['pytorch']", ""), "reasoning_parser": ("Optional[str]", "allowlist")}
LISTED_TYPES = {"int", "float", "bool", "int|null", "float|null", "bool|null"}  # free text is never listed


class Upstream:
    """The manifests as judges: does the engine take this value at this path, this option with this value?"""

    def __init__(self, manifests: Path) -> None:
        self.leaves = {leaf["path"]: leaf for leaf in leaves(manifests)}
        self.judges = {path: adapter(leaf) for path, leaf in self.leaves.items()}
        self.options = {NEWEST: serve_options(manifests, "main"), OLDER: serve_options(manifests, "older")}

        self.others = of_other_lines(self)

    def takes(self, path: str, value: Any) -> bool:
        if path in SERVED_CHOICES and value in choices(self.options[NEWEST][path]):
            return True
        return path in self.judges and accepts(self.judges[path], value)

    def limited(self) -> list[str]:
        """Paths whose annotation states a limit; the others' limits stand in validators that the manifest omits."""
        return [
            path for path, leaf in self.leaves.items() if "Gt(" in leaf["annotation"] or "Ge(" in leaf["annotation"]
        ]

    def takes_option(self, version: str, flag: str, text: str) -> bool:
        entry = next((e for e in self.options[version].values() if flag in e["flags"]), None)
        if entry is None:
            return False
        kind = entry["type"].lower()
        if kind.startswith("choice"):
            return text in choices(entry)
        try:
            {"int": int, "float": float}.get(kind, str)(text)
        except ValueError:
            return False
        return True


def choices(entry: dict[str, Any]) -> list[str]:
    return yaml.safe_load(entry["type"][len("Choice(") : -1])


def typo(word: str, rng: random.Random) -> str:
    at = rng.randrange(len(word))
    letter = rng.choice(string.ascii_lowercase)
    return rng.choice(
        [word[:at] + word[at + 1 :], word[:at] + letter + word[at:], word[:at] + letter + word[at + 1 :],
         word[: at - 1] + word[at : at + 1] + word[at - 1 : at] + word[at + 1 :] if at else word + letter]
    )  # fmt: skip


def nested(path: str, value: Any) -> dict[str, Any]:
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


def merge(into: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    for key, value in other.items():
        into[key] = (
            merge(into.get(key) or {}, value) if isinstance(value, dict) and isinstance(into.get(key), dict) else value
        )
    return into


def with_discriminator(path: str, rng: random.Random) -> dict[str, Any]:
    """The key without which the engine would not know whose field `path` is."""
    field, top = schema_for(NEWEST).fields[path], path.partition(".")[0]
    name = DISCRIMINATORS.get(top)
    if name is None or path == f"{top}.{name}" or not field.variants:
        return {}
    return nested(f"{top}.{name}", rng.choice(field.variants))


def good_values(upstream: Upstream, path: str) -> list[Any]:
    """Values that the manifest takes and that break no limit of a validator."""
    leaf, field = upstream.leaves[path], schema_for(NEWEST).fields[path]
    listed = leaf["allowed_values"]
    values = [value for value in [*SAMPLES, *listed, *([item] for item in listed)] if upstream.takes(path, value)]
    return [value for value in values if not out_of_range(field, value)]


def out_of_range(field: Field, value: Any) -> bool:
    verdict = check_value(field, value)
    return verdict is not None and verdict[0] == "range"


def samples(upstream: Upstream, path: str) -> list[Any]:
    """SAMPLES without those that only a limit outside the manifest refuses: on these it does not judge."""
    if path in upstream.limited():
        return SAMPLES
    field = schema_for(NEWEST).fields[path]
    return [value for value in SAMPLES if not (upstream.takes(path, value) and out_of_range(field, value))]


def judged(values: dict[str, Any], path: str, version: str = NEWEST) -> bool:
    """Whether lint lets the key at `path` pass."""
    found = lint(yaml.safe_dump(values), Deployment(schema_for(version)))
    return not any(
        f.severity == "error" and f.code in KEY_CODES and (path + ".").startswith(f.key + ".") for f in found
    )


def base(recipes: list[dict[str, Any]], path: str, upstream: Upstream, rng: random.Random) -> dict[str, Any]:
    """A recipe with one more valid setting; the settings beside it do not matter to its verdict."""
    values = yaml.safe_load(yaml.safe_dump(rng.choice(recipes)))
    values = merge(values, with_discriminator(path, rng))
    return merge(values, nested(path, rng.choice(good_values(upstream, path))))


def mutate(kind: str, upstream: Upstream, recipes: list[dict[str, Any]], rng: random.Random) -> tuple[Any, bool, bool]:
    """(what was done, the manifest's verdict, ours)."""
    if kind == "option":
        return mutate_option(upstream, rng)
    if kind == "version":
        path, value = rng.choice(upstream.others)
        values = merge(yaml.safe_load(yaml.safe_dump(rng.choice(recipes))), nested(path, value))
        return (path, value), upstream.takes(path, value), judged(values, path)
    path = rng.choice(upstream.limited() if kind == "range" else list(upstream.leaves))
    values = base(recipes, path, upstream, rng)
    assert judged(values, path), (path, values)
    parent, _, name = path.rpartition(".")
    if kind == "typo":
        wrong = f"{parent}.{typo(name, rng)}".lstrip(".")
        place: Any = values
        for part in parent.split(".") if parent else []:
            place = place[part]
        place[wrong.rpartition(".")[2]] = place.pop(name)
        value = place[wrong.rpartition(".")[2]]
        return wrong, upstream.takes(wrong, value), judged(values, wrong)
    value = rng.choice(samples(upstream, path) if kind == "type" else [-1, 0, 1, -(2**31), 2**40, -3, 7])
    return (path, value), upstream.takes(path, value), judged(merge(values, nested(path, value)), path)


def not_listed(path: str) -> bool:
    return any(f"{path}.".startswith(f"{name}.") for name in NOT_LISTED)


def of_other_lines(upstream: Upstream) -> list[tuple[str, Any]]:
    """Keys and values that some other line had: numbers, flags and listed words only, which a manifest would list."""
    found: list[tuple[str, Any]] = []
    for line in LINES:
        for path in sorted(line_fields(line)):
            kind, allowed = line_fields(line, path, "type"), line_fields(line, path, "allowed")
            top = path.partition(".")[0]
            if not_listed(path) or DISCRIMINATORS.get(top) == path.partition(".")[2]:
                continue
            found += [(path, value) for value in allowed if path in upstream.leaves]
            if kind in LISTED_TYPES and path not in upstream.leaves:
                found.append((path, True if "bool" in kind else 1))
    return found


def mutate_option(upstream: Upstream, rng: random.Random) -> tuple[Any, bool, bool]:
    version = rng.choice([NEWEST, OLDER])
    valued = [e for v in upstream.options.values() for e in v.values() if not e["is_flag"]]
    entry = rng.choice(valued)
    flag = rng.choice(entry["flags"])
    flag = typo(flag[2:], rng).join(("--", "")) if rng.random() < 0.4 else flag
    listed = choices(entry) if entry["type"].startswith("Choice") else ["8", "0.5", "12"]
    text = rng.choice([*listed, "nothing-of-the-kind"])
    _, problems = parse_passed(schema_for(version), [flag, text])
    ours = not any(problem.severity == "error" for problem in problems)
    return (version, flag, text), upstream.takes_option(version, flag, text), ours


def read_recipes(manifests: Path) -> list[dict[str, Any]]:
    folder = manifests / "recipes"
    wide = yaml.safe_load((folder / "trtllm-wide-ep-kimi-k2-thinking.yaml").read_text())["worker_config"]
    return [yaml.safe_load((folder / "trtllm-curated-kimi-k2-thinking.yaml").read_text()), wide["gen"], wide["ctx"]]


def test_the_exceptions_are_upstreams_own(manifests: Path) -> None:
    """What of their grounds stands in the manifests and the recipe; the class's text is quoted above."""
    upstream = Upstream(manifests)
    assert not [path for path in upstream.leaves if not_listed(path)]
    balancer = yaml.safe_load((manifests / "recipes" / "trtllm-wide-ep-kimi-k2-thinking.yaml").read_text())
    assert set(balancer["worker_config"]["gen"]["moe_config"]["load_balancer"]) == {
        "num_slots",
        "layer_updates_per_iter",
    }
    for path, (annotation, converter) in SERVED_CHOICES.items():
        leaf = upstream.leaves[path]
        assert (leaf["annotation"], leaf["converter"]) == (annotation, converter)
        assert set(leaf["allowed_values"]) < set(choices(upstream.options[NEWEST][path]))


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 250), *(pytest.param(seed, 1000, marks=pytest.mark.slow) for seed in (0, 1))]
)
def test_mutations_are_judged_as_the_manifests_judge_them(manifests: Path, seed: int, count: int) -> None:
    upstream, recipes, rng = Upstream(manifests), read_recipes(manifests), random.Random(seed)
    kinds = ["typo", "type", "range", "version", "option"]
    tried, right, refused, wrong = Counter[str](), Counter[str](), Counter[str](), []
    for index in range(count):
        kind = kinds[index % len(kinds)]
        what, theirs, ours = mutate(kind, upstream, recipes, rng)
        tried[kind] += 1
        refused[kind] += not theirs
        right[kind] += theirs == ours
        if theirs != ours:
            wrong.append((kind, what, "upstream takes it" if theirs else "upstream refuses it"))
    for kind in kinds:
        print(f"{kind:8} {right[kind]}/{tried[kind]} judged alike, {refused[kind]} of them refused by the manifest")
    rate = sum(right.values()) / sum(tried.values())
    print(f"together {rate:.1%}")
    assert rate >= 0.99, wrong
