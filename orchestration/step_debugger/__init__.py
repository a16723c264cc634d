"""Runs a captured optimizer step again and shows it: python -m orchestration.step_debugger"""
