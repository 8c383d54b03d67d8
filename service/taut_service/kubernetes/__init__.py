"""What discovery and rollouts both need of Kubernetes."""
