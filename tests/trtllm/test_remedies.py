"""Keys that a release lacks, from snapshots and vLLM's options, each with the key meant."""

import random
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from tests.oracles.mutations import misspelt, paths_ever
from trtspec.trtllm.deployment import Deployment
from trtspec.trtllm.lint import lint
from trtspec.trtllm.schema import Schema, renames, schema_for

FOREIGN = yaml.safe_load(Path(__file__).with_name("vllm_options.yaml").read_text())
OF_EACH = 50  # keys of one way in one release


def lacking(schema: Schema, rng: random.Random) -> dict[str, dict[str, str]]:
    """Each way's keys, as they are written, with the key or option that each means; "" for none."""
    paths = {path: path.rpartition(".")[2] for path in schema.fields if path.count(".") < 2}
    leaves = [path.rpartition(".")[2] for path in schema.fields]
    seen = Counter([*leaves, *FOREIGN])
    successors = {old: row["to"] for old, row in renames().items()}
    successors |= {new: old for old, new in successors.items() if old in schema.fields}
    moved = {
        leaf if leaf != path else f"kv_cache_config.{leaf}": path
        for path, leaf in paths.items()
        if seen[leaf] == 1
    }
    spelt = {
        path: path.removesuffix(leaf) + misspelt(leaf, rng)
        for path, leaf in paths.items()
        if len(leaf) > 5
    }
    return {
        "renamed": {path: successors.get(path, "") for path, _ in paths_ever()},
        "moved": moved,
        "misspelt": {
            slip: path for path, slip in spelt.items() if not seen[slip.rpartition(".")[2]]
        },
        "foreign": FOREIGN,
    }


@pytest.mark.parametrize("release", ["1.2.0", "1.3.0rc20", "1.3.0rc27", "1.4.0rc4"])
def test_a_remedy_names_the_key_that_was_meant(release: str) -> None:
    rng, schema = random.Random(55), schema_for(release)
    for way, meanings in lacking(schema, rng).items():
        lacked = sorted(meanings.keys() - schema.fields.keys())
        drawn = rng.sample(lacked, min(OF_EACH, len(lacked)))
        wrong, harmful = [], []
        for written in drawn:
            meant, remedy = meanings[written], remedy_of(schema, written)
            named = {word for word in re.findall(r"[\w.]*\w", remedy) if word in schema.fields}
            known = meant in schema.fields or meant.startswith("--")
            if known and meant not in {*named, *remedy.split()}:
                wrong.append((written, meant, remedy))
            if named - {meant, written} or (known and remedy.startswith("remove")):
                harmful.append((written, meant, remedy))
        print(f"\n{release}, {way}: {len(drawn)} keys, wrong {wrong}, harmful {harmful}")
        assert len(wrong) <= len(drawn) // 20 and not harmful


def remedy_of(schema: Schema, written: str) -> str:
    text = f"{written.replace('.', ': {')}: 1{'}' * written.count('.')}\n"
    findings = lint(text, Deployment(schema))
    return next((finding.remedy for finding in findings if finding.key == written), "")
