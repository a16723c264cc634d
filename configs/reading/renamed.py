"""Keys that earlier versions used, and their present names. A configuration that still uses one is refused."""

RENAMED_KEYS = {
    "replay": "capture",
    "schedule.reuse_versions": "schedule.replay_buffer_versions",
    "schedule.reuse_share": "schedule.replay_buffer_share",
}
