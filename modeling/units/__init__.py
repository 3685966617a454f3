"""Recurrent units: projections of the input and an element-wise step."""
