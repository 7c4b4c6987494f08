"""Puts what a node sends into the stage directory of the driver, which is the truth.

Lines are appended, folders and files get their names when they are complete, a checkpoint only with the hashes of its manifest.
Checkpoints that the stage deleted, because they are old or because it rolled back, are deleted here after new ones arrived.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from grpo_tasks.cluster.outbox import Delta, Held
from grpo_tasks.content.hashes import folder_sha256
from grpo_tasks.kit.files import is_unfinished, unfinished_path
from grpo_tasks.stage.checkpoint import is_intact
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.paths import resolve
from schemas.results.model import StageResult

CHUNK_BYTES = 1 << 25
"""Bytes that travel at once."""

Read = Callable[[str, str, int, int], bytes]
"""Outbox.read of the node: name, file, offset, size."""


@dataclass(frozen=True, slots=True)
class Inbox:
    """The incoming side of a stage directory."""

    directory: StageDir
    spec: StageSpec
    node_base: str
    """Path of the base model on the node, which peft writes into adapter_config.json."""

    def clear(self) -> None:
        """Remove what a driver that was killed has received in part."""
        directory = self.directory
        for folder in (directory.root, directory.checkpoints, directory.completions(0).parent):
            for path in folder.iterdir() if folder.is_dir() else ():
                if is_unfinished(path.name):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

    def apply(self, delta: Delta, read: Read, release: Callable[[str], None]) -> None:
        """Store everything that is new, in an order that lets a driver that is killed here resume from what it has.

        Lines and the best weights come before a checkpoint that counts on them. The result, which marks the stage as finished,
        comes last.
        """
        for name, new in delta.lines.items():
            with (self.directory.root / name).open("ab") as stream:
                stream.write(new)
        for held in sorted(delta.held, key=self._rank):
            self._fetch(held, read)
            release(held.name)
        present = {folder.name: folder for folder in self.directory.checkpoints.glob("step-*")}
        # Never the last one: where the folder on the node was removed, the stage resumes from what is here.
        if delta.checkpoints is not None and delta.checkpoints & present.keys():
            for name in present.keys() - delta.checkpoints:
                shutil.rmtree(present[name])

    def _rank(self, held: Held) -> int:
        target = self.directory.root / held.name
        return 2 if target == self.directory.result else int(target.parent == self.directory.checkpoints)

    def _fetch(self, held: Held, read: Read) -> None:
        target = self.directory.root / held.name
        part = unfinished_path(target)
        shutil.rmtree(part, ignore_errors=True)
        for file, size in held.files.items():
            path = part / file if file else part
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as stream:
                for offset in range(0, size, CHUNK_BYTES):
                    stream.write(read(held.name, file, offset, CHUNK_BYTES))
        if target.parent == self.directory.checkpoints and not is_intact(part):
            shutil.rmtree(part, ignore_errors=True)
            return
        if target == self.directory.result:
            self._store_result(part)
            return
        if target in (self.directory.final, self.directory.best):
            self._restore_base(part / "adapter_config.json")
        if target.is_dir():
            shutil.rmtree(target)
        part.replace(target)

    def _restore_base(self, config: Path) -> None:
        """Name the base model as a stage on this machine would. The file keeps its layout."""
        ours = resolve(self.spec.start.path)
        if config.exists() and ours != self.node_base:
            text = config.read_text(encoding="utf-8")
            config.write_text(text.replace(json.dumps(self.node_base), json.dumps(ours)), encoding="utf-8")

    def _store_result(self, part: Path) -> None:
        """The result with the paths of the driver; its hash is that of the weights as they are here."""
        result = StageResult.load(part).moved_to(self.directory.root)
        part.unlink()
        changes: dict[str, object] = {"sha256": folder_sha256(self.directory.final)}
        if self.spec.model.lora is not None:
            changes |= {"path": self.spec.start.path}
        moved = result.model_copy(update={"model": result.model.model_copy(update=changes)})
        moved.save(self.directory.result)
