"""OptPipe: schedules for pipeline-parallel training, found by optimisation and run as planned."""
