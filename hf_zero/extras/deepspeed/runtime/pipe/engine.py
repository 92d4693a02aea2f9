"""The engine of a pipeline with DeepSpeed's names."""

from __future__ import annotations

from typing import Any

from hf_zero.errors import StateError
from hf_zero.extras.deepspeed.engine import DeepSpeedEngine
from hf_zero.extras.pipeline.pipeline_engine import PipelineEngine as StageEngine
from hf_zero.extras.pipeline.topology import PipelineGrid


class PipelineEngine(StageEngine, DeepSpeedEngine):
    """What deepspeed.initialize returns for a PipelineModule."""

    @property
    def grid(self) -> PipelineGrid:
        """This rank's place among the stages, and DeepSpeed's questions about it."""
        return self.module.grid

    @property
    def global_rank(self) -> int:
        return self.world.rank

    @property
    def micro_batches(self) -> int:
        """Of a batch: gradient_accumulation_steps."""
        return self.accumulation_steps

    @property
    def micro_batch_size(self) -> int:
        return self.train_micro_batch_size_per_gpu()

    @property
    def is_pipe_parallel(self) -> bool:
        """Whether there are several stages."""
        return self.num_stages > 1

    @property
    def is_data_parallel(self) -> bool:
        """Whether there are several pipelines."""
        return self.grid.data_parallel_size > 1

    @property
    def is_model_parallel(self) -> bool:
        """Whether there is an axis of tensor parallelism, which is the script's own."""
        return self.grid.model_parallel_size > 1

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Raises StateError: every batch ends with an update."""
        raise StateError(
            "set_gradient_accumulation_boundary: train_batch updates at the end of its gradient_accumulation_steps "
            "micro-batches.\nChange how many there are by set_train_batch_size."
        )

    def reset_activation_shape(self) -> None:
        """Nothing is to be done: shapes may change at any time."""

    def train_batch(self, data_iter: Any = None) -> Any:
        """See hf_zero.pipeline's train_batch. The loss is kept as `agg_train_loss`."""
        self.agg_train_loss = super().train_batch(data_iter)
        return self.agg_train_loss
