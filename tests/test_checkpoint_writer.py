"""The writer: exact bytes, nothing half-written, resumption to the same bytes, refusals in one line."""

import errno
import hashlib
import json
import multiprocessing
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from conftest import MakeLlama
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_checkpoint import job, write_checkpoint

from compressor.checkpoint import writer as writer_module
from compressor.checkpoint.carried_files import carried_files, carried_name
from compressor.checkpoint.safetensors_file import write_safetensors
from compressor.checkpoint.writer import CheckpointWriter
from compressor.errors import InputRefused, MachineLimit, UsageError
from compressor.sources.model import open_model
from compressor.sources.tensors import INDEX, index_directory, read_header

JOB = Path(__file__).with_name("tiny_checkpoint.py")


def files_of(directory: Path) -> dict[str, bytes]:
    return {
        str(f.relative_to(directory)): f.read_bytes() for f in sorted(directory.rglob("*")) if f.is_file()
    }


def beside(target: Path) -> list[str]:
    return sorted(path.name for path in target.parent.iterdir() if path != target)


# --- safetensors files -------------------------------------------------------------------------------


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "b": torch.randn(3, 5, generator=generator).bfloat16(),
        "a.weight_packed": torch.randint(-(2**31), 2**31 - 1, (3, 7), generator=generator, dtype=torch.int32),
        "a.weight_shape": torch.tensor([3, 7]),
        "c": torch.randn(5, 3, generator=generator).to(torch.float8_e4m3fn),
        "f": torch.randn(2, 2, generator=generator).half().t(),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(2.5),
        "bool": torch.tensor([True, False]),
        "ünïcode": torch.ones(1, dtype=torch.int8),
    }


def test_the_reference_reader_reads_what_is_written(tmp_path: Path) -> None:
    tensors = some_tensors()
    digest = write_safetensors(tmp_path / "x.safetensors", tensors)
    assert digest == hashlib.sha256((tmp_path / "x.safetensors").read_bytes()).hexdigest()
    back = load_file(tmp_path / "x.safetensors")
    assert set(back) == set(tensors)
    for name, value in tensors.items():
        assert back[name].dtype == value.dtype
        assert back[name].shape == value.shape
        assert torch.equal(back[name].float(), value.float())
    with safe_open(tmp_path / "x.safetensors", "pt") as stream:
        assert stream.metadata() == {"format": "pt"}


def test_tensors_are_aligned_and_order_does_not_matter(tmp_path: Path) -> None:
    tensors = some_tensors()
    one = write_safetensors(tmp_path / "1", tensors)
    two = write_safetensors(tmp_path / "2", dict(reversed(tensors.items())))
    assert one == two
    entries, _ = read_header(tmp_path / "1")
    for entry in entries.values():
        assert entry.begin % entry.torch_dtype.itemsize == 0
    assert min(entry.begin for entry in entries.values()) % 8 == 0


def test_ranges_of_other_files_are_copied_as_bytes(tmp_path: Path) -> None:
    save_file(
        {k: v.contiguous() for k, v in some_tensors().items()} | {"nan": torch.full((3,), float("nan"))},
        tmp_path / "in",
    )
    entries, _ = read_header(tmp_path / "in")
    write_safetensors(tmp_path / "out", {**entries, "new": torch.ones(3)})
    raw = (tmp_path / "in").read_bytes()
    for name, entry in read_header(tmp_path / "out")[0].items():
        if name != "new":
            source = entries[name]
            copy = (tmp_path / "out").read_bytes()[entry.begin : entry.end]
            assert copy == raw[source.begin : source.end]


def test_a_source_that_shrinks_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(100)}, tmp_path / "in")
    entries, _ = read_header(tmp_path / "in")
    (tmp_path / "in").write_bytes((tmp_path / "in").read_bytes()[:-40])
    with pytest.raises(InputRefused, match="'a'"):
        write_safetensors(tmp_path / "out", entries)


# --- the checkpoint ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_written(make_llama: MakeLlama, tmp_path: Path, tied: bool) -> None:
    source = make_llama(tie_word_embeddings=tied)
    target = write_checkpoint(source, tmp_path / "deep" / "er" / "out")
    assert beside(target) == []
    tensors = index_directory(target)
    originals = index_directory(source)
    assert ("lm_head.weight" in tensors) == (not tied)
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        assert load_file(target / "model.safetensors")[name].equal(
            load_file(source / "model.safetensors")[name]
        )
    assert {n for n in tensors if "_proj" not in n} == {n for n in originals if "_proj" not in n}
    config = json.loads((target / "config.json").read_text())
    before = json.loads((source / "config.json").read_text())
    assert list(config) == [*before, "quantization_config"]
    assert {k: v for k, v in config.items() if k != "quantization_config"} == before
    for path in carried_files(source):
        assert (target / path).read_bytes() == (source / path).read_bytes()
    sidecar = json.loads((target / "compression.json").read_text())
    assert sidecar["files"] == {
        "model.safetensors": hashlib.sha256((target / "model.safetensors").read_bytes()).hexdigest()
    }


def test_two_runs_give_the_same_bytes(make_llama: MakeLlama, tmp_path: Path) -> None:
    source = make_llama()
    one = write_checkpoint(source, tmp_path / "1", "w4g32", {"down": "w8a8"})
    two = write_checkpoint(source, tmp_path / "2", "w4g32", {"down": "w8a8"})
    assert files_of(one) == files_of(two)


def test_shards(make_llama: MakeLlama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_llama(num_hidden_layers=11)
    whole = write_checkpoint(source, tmp_path / "whole")
    monkeypatch.setattr(writer_module, "MAX_SHARD_BYTES", 90_000)
    target = write_checkpoint(source, tmp_path / "sharded")
    index = json.loads((target / INDEX).read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 3
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    tensors = index_directory(target)
    assert index["metadata"]["total_size"] == sum(entry.nbytes for entry in tensors.values())
    for shard in shards:
        assert sum(e.nbytes for e in tensors.values() if e.file.name == shard) <= 90_000
    # Layers in the order of their numbers, not of their digits.
    first = [index["weight_map"][f"model.layers.{i}.input_layernorm.weight"] for i in range(11)]
    assert first == sorted(first)
    one, many = load_file(whole / "model.safetensors"), {}
    for shard in shards:
        many |= load_file(target / shard)
    assert set(one) == set(many)
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_a_readme_makes_room_for_the_card_and_none_is_lost() -> None:
    names = [
        "README.md",
        "README.source.md",
        "README.source.source.md",
        "docs/README.md",
        "LICENSE",
        "README.txt",
    ]
    renamed = [str(carried_name(Path(name))) for name in names]
    assert renamed == [
        "README.source.md",
        "README.source.source.md",
        "README.source.source.source.md",
        *names[3:],
    ]
    assert len(set(renamed)) == len(names)


def test_the_report_of_a_distillation_stays_behind(tmp_path: Path) -> None:
    for name in ("report.json", "report.html", "vocab.txt", "SHA256SUMS", "provenance.json", "logs/events.1"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"tool": {"name": "another"}}')
    kept = {"report.json", "report.html", "vocab.txt", "logs/events.1"}
    assert {str(path) for path in carried_files(tmp_path)} == kept, "another tool's files are the model's"
    (tmp_path / "report.json").write_text('{"tool": {"name": "compressor"}}')
    assert {str(path) for path in carried_files(tmp_path)} == {"vocab.txt"}


def test_carried_files(tmp_path: Path) -> None:
    kept = [
        "README.md", "LICENSE", "tokenizer.json", "chat_template.jinja", "vocab.txt", "spiece.model", "modeling.py",
        "generation_config.json", "modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors",
        "2_Dense/config.json", "additional_chat_templates/tool.jinja",
    ]  # fmt: skip
    left = [
        "config.json", "compression.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
        "pytorch_model.bin.index.json", "model.gguf", "tf_model.h5", "flax_model.msgpack", "training_args.bin",
        ".gitattributes", ".cache/x.json", "onnx/model.onnx", "onnx/config.json", "original/consolidated.00.pth",
        "original/params.json", "checkpoint-5/optimizer.pt", "deep/er/file.txt", "__pycache__/modeling.pyc",
    ]  # fmt: skip
    for name in kept + left:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "modules.json").write_text(
        json.dumps([{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}])
    )
    assert [str(path) for path in carried_files(tmp_path)] == sorted(kept)


def test_files_behind_links_are_copied_as_files(make_llama: MakeLlama, tmp_path: Path) -> None:
    """The hub's cache holds links to its blobs."""
    source = make_llama()
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for file in source.iterdir():
        (linked / file.name).symlink_to(file)
    target = write_checkpoint(linked, tmp_path / "out")
    assert not any(file.is_symlink() for file in target.iterdir())
    assert (target / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


# --- refusals and failures ---------------------------------------------------------------------------


def test_an_existing_target_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="--overwrite"):
        CheckpointWriter(tmp_path / "out", {}, overwrite=False)
    assert beside(tmp_path / "out") == []


def test_what_is_not_a_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("x")
    with pytest.raises(UsageError, match="not a checkpoint"):
        CheckpointWriter(tmp_path / "photos", {}, overwrite=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="not a checkpoint"):
        CheckpointWriter(tmp_path / "file", {}, overwrite=True)


def test_the_source_is_never_overwritten(make_llama: MakeLlama, tmp_path: Path) -> None:
    source = tmp_path / "model"
    shutil.copytree(make_llama(), source)
    before = files_of(source)
    with pytest.raises(UsageError, match="read from there"):
        write_checkpoint(source, source, overwrite=True)
    assert files_of(source) == before


def test_overwrite_replaces_everything(make_llama: MakeLlama, tmp_path: Path) -> None:
    target = write_checkpoint(make_llama(), tmp_path / "out", "w8")
    (target / "old.txt").write_text("x")
    write_checkpoint(make_llama(), target, "w4g32", overwrite=True)
    assert not (target / "old.txt").exists()
    assert beside(target) == []
    assert "w4g32" in (target / "compression.json").read_text()


def test_a_failure_while_publishing_restores_the_old_target(
    make_llama: MakeLlama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = write_checkpoint(make_llama(), tmp_path / "out", "w8")
    before = files_of(target)
    rename = Path.rename

    def failing(self: Path, to: Path) -> Path:
        if self.name == "checkpoint":
            raise OSError(errno.EIO, "broken")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(MachineLimit):
        write_checkpoint(make_llama(), target, "w4g32", overwrite=True)
    assert files_of(target) == before
    monkeypatch.undo()
    write_checkpoint(make_llama(), target, "w4g32", overwrite=True)
    assert files_of(target) != before
    assert beside(target) == []


def test_killed_between_the_two_renames(make_llama: MakeLlama, tmp_path: Path) -> None:
    target = write_checkpoint(make_llama(), tmp_path / "out", "w8")
    before = files_of(target)
    target.rename(tmp_path / ".out.replaced")
    with pytest.raises(UsageError, match="already exists"):
        CheckpointWriter(target, {}, overwrite=False)
    with CheckpointWriter(target, {}, overwrite=True):
        pass  # a job that finishes nothing
    assert files_of(target) == before
    assert beside(target) == []


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out", {}, overwrite=False):
        with pytest.raises(MachineLimit, match="another run"), CheckpointWriter(tmp_path / "out", {}, False):
            pass
        assert (tmp_path / ".out.partial" / "journal.json").exists()  # the first one's, untouched
    assert beside(tmp_path / "out") == []


def test_a_failed_job_without_a_finished_block_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputRefused), CheckpointWriter(tmp_path / "a" / "b" / "out", {}, False):
        raise InputRefused("bad")
    assert list(tmp_path.iterdir()) == []


def test_space_is_checked_before_work(tmp_path: Path) -> None:
    with (
        pytest.raises(MachineLimit, match=r"bytes are needed and [\d,]+ are free"),
        CheckpointWriter(tmp_path / "out", {}, False) as writer,
    ):
        writer.require_space(10**18)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk(make_llama: MakeLlama, tmp_path: Path) -> None:
    """On file systems too small for the blocks, for the shards, and for the copies."""
    sizes = ["40k", "120k", "200k"]
    mounts = [
        f"mkdir {tmp_path}/{size} && mount -t tmpfs -o size={size} tmpfs {tmp_path}/{size}" for size in sizes
    ]
    targets = " ".join(f"{tmp_path}/{size}/out" for size in sizes)
    script = f"{' && '.join(mounts)} || exit 77; {sys.executable} {JOB} {make_llama()} {targets}; ls -A {tmp_path}/*"
    try:
        done = subprocess.run(
            ["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        pytest.skip("no unshare here to mount a small file system with")
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("this machine does not let tests mount a small file system")
    ends = [line for line in done.stdout.splitlines() if ":" in line and not line.startswith(str(tmp_path))]
    assert len(ends) == 3, done.stdout + done.stderr
    for size, end in zip(sizes, ends, strict=True):
        assert end == f"MachineLimit 6: {tmp_path}/{size}/out: the disk is full: free space and run it again"
    left = done.stdout.splitlines()[3:]
    assert [line for line in left if line] == sorted(f"{tmp_path}/{size}:" for size in sizes)


def test_rejected_checkpoints_are_kept_apart(make_llama: MakeLlama, tmp_path: Path) -> None:
    source = open_model(str(make_llama()))
    with CheckpointWriter(tmp_path / "out", {}, False) as writer:
        writer.write_block(0, {"x": torch.ones(2)}, [])
        writer.finish(source, source.config, {}, set())
        rejected = writer.reject()
    assert rejected == tmp_path / "out.rejected"
    assert (rejected / "model.safetensors").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out.rejected"]


# --- resumption --------------------------------------------------------------------------------------


def stopped(target: Path, fingerprint: dict[str, object], blocks: dict[int, torch.Tensor]) -> None:
    """A run that writes ``blocks`` and is then interrupted."""
    with suppress(KeyboardInterrupt), CheckpointWriter(target, fingerprint, False) as writer:
        for index, value in blocks.items():
            writer.write_block(index, {f"block{index}": value}, [{"module": f"block{index}"}])
        raise KeyboardInterrupt


def test_resuming(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out"
    stopped(target, {"a": (1, 2)}, {0: torch.ones(2), 1: torch.zeros(3)})
    with CheckpointWriter(target, {"a": (1, 2)}, False) as writer:
        assert sorted(writer.finished) == [0, 1]
        assert writer.finished[0].records == [{"module": "block0"}]
        assert torch.equal(writer.read_block(1)["block1"], torch.zeros(3))
    assert "going on after 2 finished blocks" in capsys.readouterr().err


def test_a_damaged_block_is_done_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out"
    stopped(target, {}, {0: torch.ones(2), 1: torch.zeros(3)})
    block = tmp_path / ".out.partial" / "blocks" / "block-00001.safetensors"
    block.write_bytes(block.read_bytes()[:-1])
    with CheckpointWriter(target, {}, False) as writer:
        assert sorted(writer.finished) == [0]
    assert "block 1 is done again" in capsys.readouterr().err


def test_another_job_starts_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out"
    stopped(target, {"scheme": "w4"}, {0: torch.ones(2)})
    with CheckpointWriter(target, {"scheme": "w8"}, False) as writer:
        assert not writer.finished
        assert not (writer.partial / "blocks").exists()
    assert "starting over" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("journal", ["", "{", "[]", '{"fingerprint": {}, "blocks": [{"index": 0}]}'])
def test_a_damaged_journal_starts_over(tmp_path: Path, journal: str) -> None:
    partial = tmp_path / ".out.partial"
    partial.mkdir()
    (partial / "journal.json").write_text(journal)
    with CheckpointWriter(tmp_path / "out", {}, False) as writer:
        assert not writer.finished


def test_killed_at_any_moment(make_llama: MakeLlama, tmp_path: Path) -> None:
    """SIGKILL after every step, and in the middle of the work after it; then one run to the end."""
    source = make_llama(num_hidden_layers=3)
    reference = write_checkpoint(source, tmp_path / "reference")
    target = tmp_path / "out"
    context = multiprocessing.get_context("forkserver")
    slow_imports = ["compressor.graph", "compressor.checkpoint.writer", "compressor.checkpoint.coverage"]
    context.set_forkserver_preload([*slow_imports, "transformers.models.llama.modeling_llama"])
    runs = 0
    resumed = set()
    # (steps that the run may take, seconds that it then gets for the next one)
    for steps, seconds in [
        (1, 0.002),
        (1, 0.006),
        (1, 0.02),
        (2, 0.0),
        (3, 0.003),
        (4, 0.01),
        (5, 0.0),
        (5, 0.003),
    ]:
        ours, theirs = context.Pipe()
        process = context.Process(target=job, args=(source, target, theirs))
        process.start()
        for _ in range(steps):
            ours.recv()
            ours.send("go on")
        time.sleep(seconds)
        process.kill()
        process.join()
        if process.exitcode == 0:
            break
        runs += 1
        assert process.exitcode == -signal.SIGKILL
        if target.exists():
            assert files_of(target) == files_of(reference)
            break
        assert {path.name for path in tmp_path.iterdir()} <= {"reference", ".out.partial"}
        journal = tmp_path / ".out.partial" / "journal.json"
        if journal.exists():
            resumed.add(len(json.loads(journal.read_text())["blocks"]))
    assert runs >= 3
    assert len(resumed) >= 2  # the kills hit different stages
    if not target.exists():
        write_checkpoint(source, target)
        assert not (tmp_path / ".out.partial").exists()
    assert files_of(target) == files_of(reference)
