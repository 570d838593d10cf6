"""What the service says of itself: log lines by structlog, metrics for Prometheus."""
