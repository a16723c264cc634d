"""A receiver that can be told to forget repacking the tied head, as vLLM's own reload does on CPU: what the probe must
catch."""

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from rollouts.vllm.weight_receiver import ReceiverExtension, WeightReceiver


class ForgetfulReceiver(WeightReceiver):
    forgets = False

    def repack_tied_heads(self) -> None:
        if not self.forgets:
            super().repack_tied_heads()


class ForgetfulExtension(ReceiverExtension):
    """Named as vLLM's `worker_extension_cls`."""

    def forget(self, forgets: bool) -> None:
        self.weight_transfer_engine.forgets = forgets

    def borrowed(self) -> list[str]:
        """Parameters and buffers that lie in the mapped file."""
        model, mapped = self.weight_transfer_engine.model, self.weight_transfer_engine.file._data
        assert len(mapped), "nothing was loaded from a file yet"
        return [
            name
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]
            if 0 <= tensor.data_ptr() - mapped.data_ptr() < len(mapped)
        ]


WeightTransferEngineFactory.register_engine("forgetful", ForgetfulReceiver)
