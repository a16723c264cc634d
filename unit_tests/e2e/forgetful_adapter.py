"""A worker that can be told to drop the adapter it was sent, or to keep its old one: what the check after a load must
find, and the probe without it."""

from rollouts.vllm.weight_receiver import ReceiverExtension


class ForgetfulAdapterExtension(ReceiverExtension):
    """Named as vLLM's `worker_extension_cls`."""

    forgets, skips = "", False

    def forget_adapter(self, forgets: str, skips: bool = False) -> None:
        """forgets: "to zeros", "to old", or nothing. skips: do not read back."""
        self.forgets, self.skips = forgets, skips

    def activate_adapter(self) -> None:
        if self.forgets == "to zeros":
            self.begin_adapter(4)  # the base alone
        elif self.forgets != "to old":
            super().activate_adapter()

    def read_back(self, version: int) -> tuple[float, list[str]]:
        return (1.0, []) if self.skips else super().read_back(version)
