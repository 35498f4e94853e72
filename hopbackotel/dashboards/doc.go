// Package dashboards has no code. Its folder has a dashboard for Grafana, and alerts and a
// configuration for Prometheus, on the metrics of package hopbackotel. The profile "observe"
// of docker-compose.yml uses them.
package dashboards
