"""Defines `trtspec bench`, which measures acceptance, throughput and latency of endpoints."""

from __future__ import annotations

from trtspec import report
from trtspec.verbs.bench import BenchOptions, run_bench


def bench(options: BenchOptions) -> report.Result:
    """Measure acceptance by category, throughput and latency by load, of any OpenAI endpoint.

    Acceptance is available from trtspec's reference backend, trtllm-serve, vLLM and SGLang. Values
    that a server does not report are null.
    """
    from trtspec.bench.report import bench as page

    results, failure = run_bench(options)
    omitted = ("turns_detail", "questions_detail", "problems")  # long lists of results.json
    values = {key: value for key, value in results.to_dict().items() if key not in omitted}
    return report.Result(
        values,
        results.problems,
        [table for section in page.sections(results) for table in section.tables],
        [page.quality_line(results), page.sentence(results)],
        failure,
    )
