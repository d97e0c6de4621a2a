"""What happened, for programs (report.json) and for people (report.md, report.html)."""

from __future__ import annotations

from pathlib import Path

from gym_sdk.events import RunState
from gym_sdk.rundir import RunDir

__all__ = ["write_report"]


def write_report(run: RunDir, *, state: RunState | None = None) -> list[Path]:
    """Write the three forms from what lies in the run's folder; may be called again at any time.

    `state` is what the run will be once its report is there, if not what its events say.
    """
    from gym_trainer.records import write_json, write_text
    from gym_trainer.report.collect import collect
    from gym_trainer.report.html import render_html
    from gym_trainer.report.markdown import render_markdown

    facts = collect(run)
    if state is not None:
        facts["state"] = state.value
    write_json(run.report_path("json"), facts)
    write_text(run.report_path("md"), render_markdown(facts))
    write_text(run.report_path("html"), render_html(facts))
    return [run.report_path(suffix) for suffix in ("json", "md", "html")]
