package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/hopback/hopback/integration/rabbitmq"
	"github.com/hopback/hopback/integration/service"
)

// Targets of hopbackotel/dashboards/prometheus.yml, which are those of docker-compose.yml.
const (
	composeTarget = "host.docker.internal:9464"
	rabbitTarget  = "rabbitmq:15692"
	// commandTarget is where the command shows its metrics.
	commandTarget = "127.0.0.1:9464"
)

// startPrometheus starts a Prometheus with the configuration and the alerts of the folder
// hopbackotel/dashboards. It scrapes the command, and the queues of the first broker. end ends it.
func startPrometheus(ctx context.Context, out io.Writer, brokers []*rabbitmq.Broker) (url string, end func() error, err error) {
	dir, err := dashboardsFolder()
	if err != nil {
		return "", nil, err
	}
	config, err := os.ReadFile(filepath.Join(dir, "prometheus.yml"))
	if err != nil {
		return "", nil, err
	}
	alerts, err := os.ReadFile(filepath.Join(dir, "alerts.yml"))
	if err != nil {
		return "", nil, err
	}
	management := ""
	if len(brokers) > 0 {
		management = brokers[0].ManagementURL
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	queues := &http.Server{Handler: &queues{management: management}, ReadHeaderTimeout: 5 * time.Second}
	go func() { _ = queues.Serve(l) }()
	text := strings.NewReplacer(composeTarget, commandTarget, rabbitTarget, l.Addr().String()).Replace(string(config))
	s, err := service.Prometheus(ctx, out, text, map[string]string{"alerts.yml": string(alerts)})
	if err != nil {
		_ = queues.Close()
		return "", nil, err
	}
	if s.Dir == "" {
		fmt.Fprintf(out, "Prometheus at %s, which is yours and keeps its configuration\n", s.URL)
	} else {
		fmt.Fprintf(out, "Prometheus at %s, its alerts at %s/alerts; it scrapes your service's metrics at http://%s/metrics, and RabbitMQ's queues\n", s.URL, s.URL, commandTarget)
	}
	return s.URL, func() error {
		err := s.Close()
		_ = queues.Close()
		return err
	}, nil
}

// dashboardsFolder looks upwards from the current folder.
func dashboardsFolder() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for at := dir; ; at = filepath.Dir(at) {
		folder := filepath.Join(at, "hopbackotel", "dashboards")
		if _, err := os.Stat(filepath.Join(folder, "alerts.yml")); err == nil {
			return folder, nil
		}
		if at == filepath.Dir(at) {
			return "", fmt.Errorf("no hopbackotel/dashboards/alerts.yml in %s or above; start this inside the repository", dir)
		}
	}
}

// queues shows the numbers of a broker's queues as RabbitMQ's plugin for Prometheus does,
// which brokers of Debian's packages don't run. It asks the management API.
type queues struct{ management string }

func (q *queues) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if q.management == "" {
		http.Error(w, "there is no RabbitMQ", http.StatusServiceUnavailable)
		return
	}
	var all []queueNumbers
	if err := rabbitmq.API(r.Context(), http.MethodGet, q.management, "/queues?columns=vhost,name,messages_ready,messages_unacknowledged", &all); err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	var ready, unacked strings.Builder
	for _, x := range all {
		labels := fmt.Sprintf("{vhost=%s,queue=%s}", label(x.VHost), label(x.Name))
		fmt.Fprintf(&ready, "rabbitmq_detailed_queue_messages_ready%s %d\n", labels, x.Ready)
		fmt.Fprintf(&unacked, "rabbitmq_detailed_queue_messages_unacked%s %d\n", labels, x.Unacked)
	}
	w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	_, _ = io.WriteString(w, "# TYPE rabbitmq_detailed_queue_messages_ready gauge\n"+ready.String()+
		"# TYPE rabbitmq_detailed_queue_messages_unacked gauge\n"+unacked.String())
}

type queueNumbers struct {
	VHost   string `json:"vhost"`
	Name    string `json:"name"`
	Ready   int64  `json:"messages_ready"`
	Unacked int64  `json:"messages_unacknowledged"`
}

// label is a label's value, quoted.
func label(s string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`).Replace(s) + `"`
}
