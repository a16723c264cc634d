"""A worker that can be told to drop the adapter it was sent: what the probe must catch."""

from rollouts.vllm.weight_receiver import ReceiverExtension


class ForgetfulAdapterExtension(ReceiverExtension):
    """Named as vLLM's `worker_extension_cls`."""

    def forget_adapter(self, forgets: bool) -> None:
        self.weight_transfer_engine.forgets_adapter = forgets

    def activate_adapter(self) -> None:
        if getattr(self.weight_transfer_engine, "forgets_adapter", False):
            self.begin_adapter(4)  # zeros: the base alone
        else:
            super().activate_adapter()
