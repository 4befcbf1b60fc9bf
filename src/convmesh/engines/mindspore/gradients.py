"""The graphs that differentiate the loss of one micro-batch, alone or added up over several."""

from __future__ import annotations

from collections.abc import Mapping

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from convmesh.engines.mindspore.channel_axis import Keep, Sum
from convmesh.engines.mindspore.channel_split import ChannelSplit


class Backward(nn.Cell):
    """Loss and gradients of one micro-batch.

    Args:
        loss: From a micro-batch to what is differentiated, the sum of its losses, and its scores.
        parameters: What it is differentiated by, by neutral name.
        split: How the network is split along channels, or None.
    """

    def __init__(self, loss: nn.Cell, parameters: Mapping[str, Parameter], split: ChannelSplit | None) -> None:
        super().__init__(auto_prefix=False)
        self.differentiate = ops.value_and_grad(loss, None, ms.ParameterTuple(parameters.values()), has_aux=True)
        self.loss = loss
        self.count = len(parameters)
        summed = split.summed if split is not None else ()
        self.is_summed = tuple(name in summed for name in parameters)
        self.sum = Sum(split.axis) if split is not None else Keep()

    def construct(self, images_NHWC: Tensor, labels_N: Tensor, weights_N: Tensor, factor: Tensor) -> tuple[Tensor, ...]:
        """Computes and differentiates the loss.

        Args:
            images_NHWC: uint8 pixels.
            labels_N: int32 classes.
            weights_N: Weight of each sample.
            factor: Loss scale divided by the samples of the global batch.

        Returns:
            The sum of the losses, the scores, and after that the gradient of each parameter. Of whole parameters that
            every rank uses for own channels only, gradients are summed over the channel axis.
        """
        (_, loss_sum, scores_NK), gradients = self.differentiate(images_NHWC, labels_N, weights_N, factor)
        whole: tuple[Tensor, ...] = ()
        for index in range(self.count):
            gradient = gradients[index]
            if self.is_summed[index]:
                gradient = self.sum(gradient)
            whole += (gradient,)
        return (loss_sum, scores_NK, *whole)


class Accumulate(nn.Cell):
    """Loss of one micro-batch; its gradients are added to sums.

    Args:
        backward: Loss and gradients of one micro-batch.
        sums: One per gradient.
    """

    def __init__(self, backward: Backward, *, sums: list[Parameter]) -> None:
        super().__init__(auto_prefix=False)
        self.backward = backward
        self.sums = ms.ParameterTuple(sums)
        self.count = len(sums)

    def construct(
        self, images_NHWC: Tensor, labels_N: Tensor, weights_N: Tensor, factor: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Computes and differentiates the loss.

        Args:
            images_NHWC: uint8 pixels.
            labels_N: int32 classes.
            weights_N: Weight of each sample.
            factor: Loss scale divided by the samples of the global batch.

        Returns:
            The sum of the losses, and the scores.
        """
        results = self.backward(images_NHWC, labels_N, weights_N, factor)
        loss_sum = results[0]
        for index in range(self.count):
            loss_sum = ops.depend(loss_sum, ops.assign_add(self.sums[index], results[index + 2]))
        return loss_sum, results[1]


class Take(nn.Cell):
    """Hands sums over and clears them.

    Args:
        sums: The sums.
    """

    def __init__(self, sums: list[Parameter]) -> None:
        super().__init__(auto_prefix=False)
        self.sums = ms.ParameterTuple(sums)
        self.count = len(sums)

    def construct(self, nothing: Tensor) -> tuple[Tensor, ...]:
        """Copies of the sums.

        Args:
            nothing: The number 0.

        Returns:
            One per sum.
        """
        taken: tuple[Tensor, ...] = ()
        for index in range(self.count):
            # A copy that the compiler can't leave out, since it does not know that this number is 0.
            taken += (self.sums[index] + nothing,)
        for index in range(self.count):
            # Zeros that the compiler knows of would be kept in memory as constants.
            zeros = ops.broadcast_to(ops.reshape(nothing, (1,)), self.sums[index].shape)
            taken = ops.depend(taken, ops.assign(self.sums[index], zeros))
        return taken
