"""The `activation_checkpointing` block of an engine's configuration, in force while the engine is on its model."""

from __future__ import annotations

from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.parts import EnginePart
from hf_zero.extras.activations import active


class CheckpointingPart(EnginePart):
    """Applies the block to every region of the process. The last engine with the block decides."""

    engine: ZeroEngine

    def attach(self) -> None:
        engine = self.engine
        settings = engine.config.activation_checkpointing
        if not (engine.trains and settings.is_on):
            return
        engine.on_uninstall(active.use(settings, engine.device, engine.rank))
        if engine.run_comm.rank == 0:
            engine.on_uninstall(active.tell_no_region(engine.module))

    def memory(self) -> dict[str, int]:
        return {f"saved_inputs_{what}": count for what, count in active.usage().items()}
