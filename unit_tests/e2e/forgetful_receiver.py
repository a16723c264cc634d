"""A receiver that can be told to forget repacking the tied head, as vLLM's own reload does on CPU: what the probe must
catch."""

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from rollouts.weight_receiver import ReceiverExtension, WeightReceiver


class ForgetfulReceiver(WeightReceiver):
    forgets = False

    def repack_tied_heads(self) -> None:
        if not self.forgets:
            super().repack_tied_heads()


class ForgetfulExtension(ReceiverExtension):
    """Named as vLLM's `worker_extension_cls`."""

    def forget(self, forgets: bool) -> None:
        self.weight_transfer_engine.forgets = forgets


WeightTransferEngineFactory.register_engine("forgetful", ForgetfulReceiver)
