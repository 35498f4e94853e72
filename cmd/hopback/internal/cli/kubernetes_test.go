package cli_test

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/hopback/hopback/cmd/hopback/internal/cli"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/health"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/operate/topologyfile"
	"github.com/hopback/hopback/retry"
)

const root = "../../../.."

// The types have the keys that examples/kubernetes uses, by the API references of Kubernetes,
// KEDA, and RabbitMQ's Cluster Operator. A misspelled key is an error.
type (
	labels   map[string]string
	metadata struct{ Name string }
	selector struct {
		MatchLabels labels `yaml:"matchLabels"`
	}
	keyRef struct{ Name, Key string }
	probe  struct {
		HTTPGet          struct{ Path, Port string } `yaml:"httpGet"`
		PeriodSeconds    int                         `yaml:"periodSeconds"`
		FailureThreshold int                         `yaml:"failureThreshold"`
	}
	container struct {
		Name, Image string
		Args        []string
		Env         []struct {
			Name, Value string
			ValueFrom   struct {
				SecretKeyRef keyRef `yaml:"secretKeyRef"`
			} `yaml:"valueFrom"`
		}
		Ports []struct {
			Name          string
			ContainerPort int `yaml:"containerPort"`
		}
		LivenessProbe  probe `yaml:"livenessProbe"`
		ReadinessProbe probe `yaml:"readinessProbe"`
		Resources      struct{ Requests, Limits map[string]string }
		VolumeMounts   []struct {
			Name      string
			MountPath string `yaml:"mountPath"`
			ReadOnly  bool   `yaml:"readOnly"`
		} `yaml:"volumeMounts"`
	}
	podTemplate struct {
		Metadata struct{ Labels labels }
		Spec     struct {
			TerminationGracePeriodSeconds int    `yaml:"terminationGracePeriodSeconds"`
			RestartPolicy                 string `yaml:"restartPolicy"`
			Containers                    []container
			Volumes                       []struct {
				Name      string
				ConfigMap metadata `yaml:"configMap"`
			}
		}
	}
	deployment struct {
		Replicas int
		Selector selector
		Template podTemplate
	}
	job struct {
		BackoffLimit     int `yaml:"backoffLimit"`
		PodFailurePolicy struct {
			Rules []struct {
				Action      string
				OnExitCodes struct {
					ContainerName string `yaml:"containerName"`
					Operator      string
					Values        []int
				} `yaml:"onExitCodes"`
			}
		} `yaml:"podFailurePolicy"`
		Template podTemplate
	}
	disruptionBudget struct {
		MaxUnavailable int `yaml:"maxUnavailable"`
		Selector       selector
	}
	triggerAuthentication struct {
		SecretTargetRef []struct{ Parameter, Name, Key string } `yaml:"secretTargetRef"`
	}
	scaledObject struct {
		ScaleTargetRef  metadata `yaml:"scaleTargetRef"`
		MinReplicaCount int      `yaml:"minReplicaCount"`
		MaxReplicaCount int      `yaml:"maxReplicaCount"`
		CooldownPeriod  int      `yaml:"cooldownPeriod"`
		Triggers        []struct {
			Type              string
			AuthenticationRef metadata `yaml:"authenticationRef"`
			Metadata          map[string]string
		}
	}
	rabbitmqCluster struct {
		Replicas    int
		Image       string
		Persistence struct{ Storage string }
		Rabbitmq    struct {
			AdvancedConfig string `yaml:"advancedConfig"`
		}
	}
)

// manifests are those of examples/kubernetes, by kind and name.
type manifests struct {
	secrets, configs map[string]map[string]string
	worker           deployment
	apply            job
	budget           disruptionBudget
	auth             triggerAuthentication
	scaled           scaledObject
	broker           rabbitmqCluster
	kinds            []string
}

func strictly(t *testing.T, n yaml.Node, to any) {
	t.Helper()
	text, err := yaml.Marshal(&n)
	require.NoError(t, err)
	d := yaml.NewDecoder(bytes.NewReader(text))
	d.KnownFields(true)
	require.NoError(t, d.Decode(to), "%s", text)
}

func readManifests(t *testing.T) (m manifests) {
	t.Helper()
	m.secrets, m.configs = map[string]map[string]string{}, map[string]map[string]string{}
	files, err := filepath.Glob(root + "/examples/kubernetes/*.yaml")
	require.NoError(t, err)
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		d := yaml.NewDecoder(bytes.NewReader(text))
		d.KnownFields(true)
		for {
			var doc struct {
				APIVersion string `yaml:"apiVersion"`
				Kind       string
				Metadata   metadata
				Spec       yaml.Node
				Data       map[string]string
				StringData map[string]string `yaml:"stringData"`
			}
			err := d.Decode(&doc)
			if errors.Is(err, io.EOF) {
				break
			}
			require.NoError(t, err, file)
			kind := doc.APIVersion + " " + doc.Kind
			m.kinds = append(m.kinds, kind)
			switch kind {
			case "v1 Secret":
				m.secrets[doc.Metadata.Name] = doc.StringData
			case "v1 ConfigMap":
				m.configs[doc.Metadata.Name] = doc.Data
			case "apps/v1 Deployment":
				require.Equal(t, "orders-worker", doc.Metadata.Name)
				strictly(t, doc.Spec, &m.worker)
			case "batch/v1 Job":
				strictly(t, doc.Spec, &m.apply)
			case "policy/v1 PodDisruptionBudget":
				strictly(t, doc.Spec, &m.budget)
			case "keda.sh/v1alpha1 TriggerAuthentication":
				strictly(t, doc.Spec, &m.auth)
			case "keda.sh/v1alpha1 ScaledObject":
				strictly(t, doc.Spec, &m.scaled)
			case "rabbitmq.com/v1beta1 RabbitmqCluster":
				strictly(t, doc.Spec, &m.broker)
			default:
				require.Fail(t, "no type for it", kind)
			}
		}
	}
	require.Len(t, m.kinds, 10)
	return m
}

// secretsOf are the secrets that a container reads: they exist.
func (m manifests) secretsOf(t *testing.T, c container) {
	t.Helper()
	for _, e := range c.Env {
		if ref := e.ValueFrom.SecretKeyRef; ref.Name != "" {
			assert.NotEmpty(t, m.secrets[ref.Name][ref.Key], "%s of container %s", e.Name, c.Name)
		} else {
			assert.NotEmpty(t, e.Value, e.Name)
		}
	}
}

// kubernetesProgram returns the program of docs/kubernetes.md.
func kubernetesProgram(t *testing.T) string {
	t.Helper()
	page, err := os.ReadFile(root + "/docs/kubernetes.md")
	require.NoError(t, err)
	_, program, found := strings.Cut(string(page), "\n```go\npackage main\n")
	require.True(t, found)
	program, _, found = strings.Cut(program, "\n```\n")
	require.True(t, found)
	return program
}

// The manifests fit the program of docs/kubernetes.md, and each other.
func TestKubernetesManifestsFitTheProgram(t *testing.T) {
	t.Parallel()
	m := readManifests(t)
	source := kubernetesProgram(t)
	find := func(pattern string) string {
		found := regexp.MustCompile(pattern).FindStringSubmatch(source)
		require.Len(t, found, 2, pattern)
		return found[1]
	}
	seconds := func(pattern string) int {
		n, err := strconv.Atoi(find(pattern))
		require.NoError(t, err)
		return n
	}
	pod := m.worker.Template
	require.Len(t, pod.Spec.Containers, 1)
	c := pod.Spec.Containers[0]
	m.secretsOf(t, c)

	grace, closing := seconds(`Grace: (\d+) \* time\.Second`), seconds(`WithTimeout\(context\.Background\(\), (\d+)\*time\.Second\)`)
	assert.GreaterOrEqual(t, pod.Spec.TerminationGracePeriodSeconds, grace+5+closing, "Consume returns 5 s after Grace at the latest, and Close comes after that")
	assert.Contains(t, source, "syscall.SIGTERM")

	require.Len(t, c.Ports, 1)
	assert.Equal(t, find(`Addr: ":(\d+)"`), strconv.Itoa(c.Ports[0].ContainerPort))
	handler := health.Handler(health.Config{}) // without connections: live and not ready
	for p, status := range map[probe]int{c.LivenessProbe: http.StatusOK, c.ReadinessProbe: http.StatusServiceUnavailable} {
		assert.Equal(t, c.Ports[0].Name, p.HTTPGet.Port)
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequest(http.MethodGet, p.HTTPGet.Path, nil))
		assert.Equal(t, status, w.Code, p.HTTPGet.Path)
	}
	const connectTimeout = 15 // Config.ConnectTimeout; the program doesn't listen before
	assert.Greater(t, c.LivenessProbe.PeriodSeconds*c.LivenessProbe.FailureThreshold, connectTimeout)

	assert.Equal(t, pod.Metadata.Labels, m.worker.Selector.MatchLabels)
	assert.Equal(t, pod.Metadata.Labels, m.budget.Selector.MatchLabels)
	assert.Less(t, m.budget.MaxUnavailable, m.worker.Replicas)
	assert.Equal(t, "orders-worker", m.scaled.ScaleTargetRef.Name)
	assert.Equal(t, m.worker.Replicas, m.scaled.MinReplicaCount)
	require.Len(t, m.scaled.Triggers, 1)
	trigger := m.scaled.Triggers[0]
	assert.Equal(t, find(`Name:  "(\w+)"`), trigger.Metadata["queueName"])
	assert.Equal(t, "http", trigger.Metadata["protocol"])
	require.Len(t, m.auth.SecretTargetRef, 1)
	assert.Contains(t, m.secrets[m.auth.SecretTargetRef[0].Name][m.auth.SecretTargetRef[0].Key], "http://")
	assert.Contains(t, m.broker.Rabbitmq.AdvancedConfig, "{dead_letter_worker_publisher_confirm_timeout, 10000}")
}

// The job's command line, with the file of the ConfigMap, declares what the program's policy needs.
func TestKubernetesJobAppliesTheProgramsTopology(t *testing.T) {
	t.Parallel()
	m := readManifests(t)
	c := m.apply.Template.Spec.Containers[0]
	m.secretsOf(t, c)
	assert.Equal(t, "Never", m.apply.Template.Spec.RestartPolicy, "a pod failure policy needs it")
	rule := m.apply.PodFailurePolicy.Rules[0]
	assert.Equal(t, []int{cli.No, cli.Usage}, rule.OnExitCodes.Values)
	assert.Equal(t, c.Name, rule.OnExitCodes.ContainerName)

	mount, volume := c.VolumeMounts[0], m.apply.Template.Spec.Volumes[0]
	assert.Equal(t, volume.Name, mount.Name)
	in, name := filepath.Split(c.Args[len(c.Args)-1])
	assert.Equal(t, mount.MountPath, filepath.Clean(in))
	text := m.configs[volume.ConfigMap.Name][name]
	f, err := topologyfile.Parse(name, []byte(text))
	require.NoError(t, err)
	source := kubernetesProgram(t)
	assert.Contains(t, source, "hopback.Policy{MaxRetries: 3, Backoff: hopback.Delays(10*time.Second, time.Minute)}")
	policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(10*time.Second, time.Minute)}
	want, err := retry.Topology(policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 5})
	require.NoError(t, err)
	assert.Equal(t, want, f.Topology)
	assert.Equal(t, policy.MaxRetries, f.Policy.MaxRetries)

	b := hopbacktest.Start(t, hopbacktest.Config{})
	url, err := b.Listen("127.0.0.1:0")
	require.NoError(t, err)
	args := append(c.Args[:len(c.Args)-1:len(c.Args)-1], file(t, "topology.yaml", text))
	r := world{env: map[string]string{"HOPBACK_URL": url, "HOPBACK_MANAGEMENT_URL": "none"}}.run(args...)
	assert.Zero(t, r.code, r.stderr)
	assert.Contains(t, r.stdout, "created")
}

// The page shows the manifests line for line.
func TestKubernetesPageShowsTheManifests(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile(root + "/docs/kubernetes.md")
	require.NoError(t, err)
	var all strings.Builder
	files, err := filepath.Glob(root + "/examples/kubernetes/*.yaml")
	require.NoError(t, err)
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		all.Write(text)
		assert.Contains(t, string(page), filepath.Base(file))
	}
	blocks := 0
	for rest := string(page); ; blocks++ {
		_, after, ok := strings.Cut(rest, "\n```yaml\n")
		if !ok {
			break
		}
		text, behind, _ := strings.Cut(after, "```")
		assert.Contains(t, all.String(), text)
		rest = behind
	}
	assert.GreaterOrEqual(t, blocks, 4)
}
