// Package observe tests what this folder has for operators: a dashboard for Grafana, and
// alerts and a configuration for Prometheus. The profile "observe" of docker-compose.yml
// uses them.
package observe
