"""The `activation_checkpointing` block of an engine's configuration, in force while the engine is on its model."""

from __future__ import annotations

from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.parts import EnginePart
from hf_zero.errors import OffloadError
from hf_zero.extras.activations import active


class CheckpointingPart(EnginePart):
    """Applies the block to every region of the process. The last engine with the block decides."""

    engine: ZeroEngine

    def attach(self) -> None:
        """All ranks must call: a folder that one of them cannot use is an error of all."""
        settings = self.engine.config.activation_checkpointing
        if not (self.engine.trains and settings.is_on):
            return
        if settings.nvme_path is None:
            self._start()
        else:
            what = "activation_checkpointing.nvme_path"
            self.engine.comm.agree(what, self._start, OffloadError)

    def _start(self) -> None:
        engine, config = self.engine, self.engine.config
        guard = engine.comm.stop_together
        settings = config.activation_checkpointing
        engine.on_uninstall(active.use(settings, engine.device, engine.rank, aio=config.aio, guard=guard))
        if engine.run_comm.rank == 0:
            engine.on_uninstall(active.tell_no_region(engine.module))

    def memory(self) -> dict[str, int]:
        return {f"saved_inputs_{what}": count for what, count in active.usage().items()}
