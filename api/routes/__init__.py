"""The calls of the service, one file a resource."""
