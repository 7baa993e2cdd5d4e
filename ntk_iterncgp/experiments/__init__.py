"""The command line and what it runs: settings, data sets, models, evaluation, reports, reproduction."""
