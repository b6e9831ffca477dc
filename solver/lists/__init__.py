"""List schedulers: ops by priority, each as early as its device, its inputs and memory allow."""
