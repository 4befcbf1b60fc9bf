"""Dynamic loss scaling: which factor the loss gets so that float16 gradients neither vanish nor overflow."""

from __future__ import annotations

from dataclasses import dataclass

from convmesh.config.schema import PrecisionConfig
from convmesh.errors import ConvMeshError


@dataclass
class LossScaler:
    """The state of dynamic loss scaling; pure integers and floats, equal on all ranks.

    The scale is divided by ``factor`` after an update that overflowed and multiplied by it after ``window`` updates
    without overflow (Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2).

    Args:
        scale: Factor on the loss; 1 and constant if ``enabled`` is false.
        factor: Step of the scale.
        window: Updates without overflow before the scale grows.
        enabled: Whether the scale changes at all.
        num_quiet: Updates without overflow since the last change.
        num_skipped: Updates skipped so far.
    """

    scale: float = 1.0
    factor: float = 2.0
    window: int = 200
    enabled: bool = False
    num_quiet: int = 0
    num_skipped: int = 0

    @classmethod
    def of(cls, precision: PrecisionConfig) -> LossScaler:
        """The scaler that a precision asks for: dynamic for float16, off otherwise."""
        if precision.compute != "float16":
            return cls()
        settings = precision.loss_scale
        return cls(scale=settings.initial, factor=settings.factor, window=settings.window, enabled=True)

    def after_update(self, *, overflow: bool) -> None:
        """Adjusts the scale.

        Args:
            overflow: Whether the update was skipped because a gradient was not finite.

        Raises:
            ConvMeshError: If gradients are not finite even without scaling.
        """
        if overflow:
            self.num_skipped += 1
            self.num_quiet = 0
            if not self.enabled or self.scale / self.factor < 1:
                raise ConvMeshError(
                    "gradients are not finite although the loss is not scaled",
                    got=f"loss scale {self.scale:g}",
                    fix="Lower 'optimizer.learning_rate', set 'optimizer.clip_norm', or look for bad input values",
                )
            self.scale /= self.factor
        elif self.enabled:
            self.num_quiet += 1
            if self.num_quiet == self.window:
                self.scale *= self.factor
                self.num_quiet = 0
