"""What plugin authors test with: mock plugins, fixtures and conformance suites, shipped in the wheel."""
