"""Distill by recipe and write the report beside the student."""

from dataclasses import replace
from pathlib import Path

from compressor.distillation.run import Job, distill
from compressor.evaluation.facts import model_facts
from compressor.pipelines.provenance import tool_section
from compressor.reports.gates import check_gate, of_distillation
from compressor.reports.schema import Distillation, Gate, Model, Report
from compressor.reports.write import write_report
from compressor.sources.model import open_model


def run_distill(job: Job, output: Path, *, overwrite: bool, started: float) -> Gate | None:
    """Run ``job``; ``output`` gets the student and its report.

    ``started`` is ``time.monotonic()`` at the command's start. Returns what the gates on
    the student came to, in the process that writes the report; they may have failed.
    """
    wanted = of_distillation(job.recipe)
    gates: list[Gate | None] = []

    def write(section: Distillation, warnings: list[str], directory: Path) -> None:
        student = replace(
            model_facts(open_model(str(directory), allow_quantized=True)),
            ref=str(output),
            path=str(output.absolute()),
        )
        report = Report(
            tool=tool_section(
                "distill",
                job.recipe.model_dump(mode="json"),
                seed=job.recipe.seed,
                device=job.device,
                started=started,
            ),
            source=Model.of(model_facts(job.teacher)),
            artifact=Model.of(student),
            distillation=section,
            warnings=warnings,
        )
        report = report.model_copy(update={"gate": check_gate(report, wanted)})
        write_report(report, directory)
        gates.append(report.gate)

    distill(job, output, overwrite=overwrite, write=write)
    return gates[0] if gates else None
