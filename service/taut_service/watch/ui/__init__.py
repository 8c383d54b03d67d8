"""The operator's page at ``/ui`` of the admin port: plain HTML, CSS and JavaScript."""
