"""This room runs a captured update again and shows it: python -m orchestration.step_debugger"""
