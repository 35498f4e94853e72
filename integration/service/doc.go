// Package service starts the servers other than RabbitMQ that tests, examples and
// benchmarks need: PostgreSQL, Redis, Prometheus, and nginx.
//
// A server is found in this order:
//
//  1. The environment names one that runs: HOPBACK_POSTGRES_URL, HOPBACK_REDIS_URL,
//     HOPBACK_PROMETHEUS_URL or HOPBACK_NGINX_URL. It is used, and never stopped.
//  2. Its program is on this machine, in PATH or where Debian puts it.
//  3. This process is root on Debian: apt-get installs the package.
//
// Otherwise the error is a [*NoWayError], which says what to set. With Docker, "docker
// compose --profile database up -d" starts a PostgreSQL and a Redis to name there.
//
// A started server listens on a free port of 127.0.0.1, keeps its data in a temporary
// folder, and ends with the process that started it, even if that is killed. It is for
// tests: it has no password, and it writes to the disk without waiting.
package service
