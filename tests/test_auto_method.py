"""``--method auto``: the best method that fits the time budget, recorded, and kept by a run that goes on."""

import json
from pathlib import Path

import pytest
import torch
from conftest import MakeLlama
from pydantic import ValidationError

from compressor.checkpoint.verify import verify
from compressor.checkpoint.writer import CheckpointWriter, begun_with
from compressor.pipelines import estimate as estimate_module
from compressor.pipelines.estimate import resolve_method
from compressor.pipelines.job import prepare
from compressor.pipelines.quantize import quantize
from compressor.recipes import QuantizeRecipe, Recipe
from compressor.sources.model import open_model


def recipe(model: Path, budget: float) -> Recipe:
    return Recipe.model_validate(
        {
            "model": str(model),
            "device": "cpu",
            "quantize": {
                "scheme": "w4g32",
                "method": "auto",
                "time_budget": budget,
                "calibration": {"samples": 8, "sequence_length": 32},
            },
        }
    )


@pytest.mark.parametrize(
    ("text", "minutes"), [("90s", 1.5), ("10m", 10.0), ("1.5h", 90.0), ("7", 7.0), (7, 7.0)]
)
def test_times_are_written_as_people_write_them(text: object, minutes: float) -> None:
    assert QuantizeRecipe.model_validate({"method": "auto", "time_budget": text}).time_budget == minutes


@pytest.mark.parametrize(
    "settings",
    [{"method": "auto"}, {"method": "gptq", "time_budget": "10m"}, {"method": "auto", "time_budget": "soon"},
     {"method": "auto", "time_budget": "xm"}, {"method": "auto", "time_budget": "0m"}],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        QuantizeRecipe.model_validate(settings)


def test_more_time_buys_a_better_method(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        estimate_module, "_speed", lambda job: 1e6
    )  # a machine on which everything takes long
    rank = {"rtn": 0, "gptq": 1, "adaround": 2}
    found = []
    for budget in (1e-9, 0.1, 1, 10, 100, 1000, 10_000, 1e9):
        job = prepare(recipe(tiny_llama_dir, budget))
        job, resolved = resolve_method(job, recipe(tiny_llama_dir, budget))
        settings = resolved.quantize
        found.append(
            (rank[settings.method], settings.adaround.iterations if settings.method == "adaround" else 0)
        )
        assert (job.tokens is None) == (settings.method == "rtn")
    assert found == sorted(found)
    assert {method for method, _ in found} == {0, 1, 2}
    assert len({n for method, n in found if method == 2}) > 1


def test_a_run_that_goes_on_keeps_what_it_chose(
    tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "q"
    write = CheckpointWriter.write_block

    def killed(self: CheckpointWriter, index: int, *rest: object) -> None:
        write(self, index, *rest)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    wanted = recipe(tiny_llama_dir, 10)
    monkeypatch.setattr(estimate_module, "_speed", lambda job: 1e9)
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "write_block", killed)
        with pytest.raises(KeyboardInterrupt):
            quantize(wanted, target)
    begun = begun_with(target)["settings"]
    assert begun["method"] == "adaround"
    monkeypatch.setattr(estimate_module, "_speed", lambda job: 1e3)  # now it would choose otherwise
    assert resolve_method(prepare(wanted), wanted)[1].quantize.method == "rtn"
    done = quantize(wanted, target)
    assert done.settings.method == "adaround"
    assert done.settings.adaround.iterations == begun["adaround"]["iterations"]


def test_the_checkpoint_says_what_was_chosen(
    make_llama: MakeLlama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_llama(seed=4, dtype=torch.bfloat16)
    monkeypatch.setattr(estimate_module, "_speed", lambda job: 1e9)
    done = quantize(recipe(model, 1e-9), tmp_path / "q")
    stored = json.loads((tmp_path / "q" / "compression.json").read_text())
    assert done.settings.method == stored["settings"]["method"] == "rtn"
    assert stored["calibration"] is None
    assert all(check.passed for check in verify(tmp_path / "q", source=open_model(str(model))))
