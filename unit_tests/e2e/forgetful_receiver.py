"""A receiver that forgets to repack the tied head, as vLLM's own reload does on CPU: what the probe must catch."""

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from rollouts.weight_receiver import FileWeightReceiver, ReceiverExtension


class ForgetfulReceiver(FileWeightReceiver):
    def repack_tied_heads(self) -> None:
        pass


class ForgetfulExtension(ReceiverExtension):
    """Named as vLLM's `worker_extension_cls`."""


WeightTransferEngineFactory.register_engine("forgetful", ForgetfulReceiver)
