"""Rows, runner, report and training that all experiments share."""
