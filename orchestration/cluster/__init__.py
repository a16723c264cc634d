"""Machines and processes: devices, cores, Ray, heartbeats, the watchdog."""
