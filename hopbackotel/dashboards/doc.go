// Package dashboards has no code. Its folder contains a Grafana dashboard, and alerts and a
// configuration for Prometheus, for the metrics of package hopbackotel. The profile "observe" of
// docker-compose.yml uses them.
//
// This package is a preview: a minor version may change its names. See docs/versions.md#stability.
package dashboards
