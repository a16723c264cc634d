"""This room holds what concerns machines and processes: devices, cores, Ray, heartbeats and the watchdog."""
