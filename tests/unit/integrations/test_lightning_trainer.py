"""`FpfsCheckpointIO` in Trainers of both packages: names, and files, are as by Lightning's own."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fpfs.client import async_saving
from fpfs.client.saving import Save
from fpfs.integrations import lightning
from fpfs.integrations.lightning import FpfsCheckpointIO
from tests.support.failures.calls import full
from tests.support.states import flushed_files

pytestmark = pytest.mark.filterwarnings("ignore")
"""Lightning's, of small data and few processes."""


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def package(request: pytest.FixtureRequest) -> Any:
    module = importlib.import_module(request.param)
    logging.getLogger(request.param).setLevel(logging.ERROR)
    return module


class Late(FpfsCheckpointIO):
    """Writes nothing of a save until somebody waits for it, as the next save does."""

    may_write = threading.Event()

    def wait(self) -> None:
        self.may_write.set()
        super().wait()
        self.may_write.clear()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[Late]:
    Late.may_write.clear()
    write = Save.write

    def held(*arguments: Any, **words: Any) -> Any:
        assert Late.may_write.wait(60)
        return write(*arguments, **words)

    monkeypatch.setattr(async_saving.Save, "write", held)
    plugin = Late()
    yield plugin
    plugin.teardown()


def trainer_of(package: Any, plugin: FpfsCheckpointIO | None, **arguments: Any) -> Any:
    return package.Trainer(
        accelerator="cpu",
        devices=1,
        plugins=[] if plugin is None else [plugin],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )


def model_of(package: Any) -> Any:
    class Regression(package.LightningModule):  # type: ignore[misc]
        """Has the losses 0.5, 0.6, 0.4, 0.7 after its epochs."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2)

        def val_dataloader(self) -> Any:
            return self.train_dataloader()

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.layer(batch).square().mean()

        def validation_step(self, _: torch.Tensor, __: int) -> None:
            self.log("loss", (0.5, 0.6, 0.4, 0.7)[self.current_epoch])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Regression()


def left_in(folder: Path) -> dict[str, tuple[int, bool]]:
    """The step of each file, and whether it has more than weights."""
    loaded = {path.name: torch.load(path, weights_only=False) for path in folder.iterdir()}
    return {name: (of["global_step"], "loops" in of) for name, of in sorted(loaded.items())}


@pytest.mark.parametrize(
    ("keeps", "left"),
    [
        ([{"filename": "best", "monitor": "loss", "save_top_k": 2}], ["best-v1", "best"]),
        ([{"filename": "best", "monitor": "loss", "save_top_k": 1}], ["best"]),
        (
            [{}, {"save_top_k": -1, "save_weights_only": True, "every_n_epochs": 2}],
            ["epoch=1-step=4-v1", "epoch=3-step=8-v1", "epoch=3-step=8"],
        ),
        (
            [{"save_last": True}, {"save_last": True, "every_n_epochs": 2}],
            ["epoch=3-step=8-v1", "epoch=3-step=8", "last-v1", "last"],
        ),
        (
            [{"save_last": "link"}, {"save_last": "link", "every_n_epochs": 2}],
            ["epoch=3-step=8-v1", "epoch=3-step=8", "last-v1", "last"],
        ),
        (
            [
                {"enable_version_counter": False},
                {"enable_version_counter": False, "every_n_epochs": 2},
            ],
            ["epoch=3-step=8"],
        ),
        (
            [
                {"filename": "{epoch}"},
                {"filename": "epoch=0", "save_top_k": -1, "every_n_epochs": 2},
            ],
            ["epoch=0", "epoch=3"],
        ),
    ],
    ids=["the best two", "the best", "weights", "last", "links", "one name", "removed"],
)
def test_names_and_files_are_those_of_lightnings_own(
    package: Any, late: Late, tmp_path: Path, keeps: list[dict[str, Any]], left: list[str]
) -> None:
    """While the file before is not there yet: no save takes its name, nor one that is removed."""
    callbacks: dict[str, Any] = {}
    for by, plugin in (("itself", None), ("fpfs", late)):
        callbacks[by] = [
            package.callbacks.ModelCheckpoint(dirpath=tmp_path / by, **words) for words in keeps
        ]
        trainer = trainer_of(package, plugin, max_epochs=4, callbacks=callbacks[by])
        trainer.fit(model_of(package))
    found = left_in(tmp_path / "fpfs")
    assert found == left_in(tmp_path / "itself")
    assert sorted(found) == sorted(f"{name}.ckpt" for name in left)
    for own, theirs in zip(callbacks["fpfs"], callbacks["itself"], strict=True):
        for name in ("best_model_path", "last_model_path"):
            assert Path(getattr(own, name)).name == Path(getattr(theirs, name)).name


def fourth_step_breaks(trainer: Any, *_: Any) -> None:
    if trainer.global_step == 3:
        raise ZeroDivisionError


def test_what_is_saved_behind_an_exception_is_durable(
    package: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loops say that an epoch is under way still. The next run saves beside training again."""
    beside: list[str] = []
    save = async_saving.AsyncSaver.save

    def noted(saver: Any, state: Any, path: str) -> Any:
        beside.append(Path(path).name)
        return save(saver, state, path)

    monkeypatch.setattr(async_saving.AsyncSaver, "save", noted)
    breaks = package.callbacks.LambdaCallback(on_train_batch_start=fourth_step_breaks)
    keep = package.callbacks.ModelCheckpoint(dirpath=tmp_path, save_top_k=-1)
    plugin = FpfsCheckpointIO()
    trainer = trainer_of(package, plugin, max_epochs=4, callbacks=[keep, breaks])
    with pytest.raises(ZeroDivisionError):
        trainer.fit(model_of(package))
    assert beside == ["epoch=0-step=2.ckpt"]
    for _ in range(2):
        with flushed_files() as flushed:
            trainer.save_checkpoint(tmp_path / "rescue.ckpt")
        assert flushed == ["rescue.ckpt"]
    with monkeypatch.context() as patch:
        patch.setattr("fpfs.client.writing.write_pieces", full)
        with pytest.raises(OSError, match=r"No space left on device.*rescue\.ckpt"):
            trainer.save_checkpoint(tmp_path / "rescue.ckpt")
    assert beside == ["epoch=0-step=2.ckpt"]
    assert left_in(tmp_path)["rescue.ckpt"] == (3, True)
    keep = package.callbacks.ModelCheckpoint(dirpath=tmp_path / "again", save_top_k=-1)
    trainer_of(package, plugin, max_epochs=3, callbacks=[keep]).fit(model_of(package))
    assert beside[1:] == [f"epoch={n}-step={2 * n + 2}.ckpt" for n in range(3)]


def test_a_class_is_known_before_a_plugin_is_made(
    package: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LightningCLI takes `--trainer.plugins=fpfs.integrations.lightning.FpfsCheckpointIO`."""
    checkpoint_class = package.callbacks.ModelCheckpoint
    monkeypatch.setattr(checkpoint_class, "file_exists", checkpoint_class.file_exists)
    spec = importlib.util.spec_from_file_location("imported_again", lightning.__file__)
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    assert issubclass(again.FpfsCheckpointIO, package.plugins.CheckpointIO)
