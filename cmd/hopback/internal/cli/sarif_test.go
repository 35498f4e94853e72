package cli_test

import (
	"encoding/json"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/operate/doctor"
)

// sarifLog is what the tests read of a report in SARIF.
type sarifLog struct {
	Runs []struct {
		Tool struct {
			Driver struct {
				Rules []struct{ ID string }
			}
		}
		Invocations []struct {
			ToolExecutionNotifications []struct{ Message struct{ Text string } }
		}
		Results []struct {
			RuleID    string
			RuleIndex int
			Level     string
			Message   struct{ Text string }
			Locations []struct {
				PhysicalLocation *struct {
					ArtifactLocation struct{ URI, URIBaseID string }
					Region           struct{ StartLine, StartColumn, EndLine, EndColumn int }
				}
				LogicalLocations []struct{ FullyQualifiedName string }
			}
			PartialFingerprints map[string]string
		}
	}
}

// readSARIF checks a report against the schema in testdata.
func readSARIF(t *testing.T, text string) sarifLog {
	t.Helper()
	compiler := jsonschema.NewCompiler()
	compiler.AssertFormat()
	schema, err := compiler.Compile("testdata/sarif.schema.json")
	require.NoError(t, err)
	document, err := jsonschema.UnmarshalJSON(strings.NewReader(text))
	require.NoError(t, err, text)
	require.NoError(t, schema.Validate(document))
	var log sarifLog
	require.NoError(t, json.Unmarshal([]byte(text), &log))
	require.Len(t, log.Runs, 1)
	return log
}

// Two virtual hosts have a queue of the same name, a line has letters of several bytes, and the last
// objects share a line.
const ailingFile = `{
  "rabbit_version": "4.3.6",
  "queues": [
    {"name": "orders", "vhost": "/", "durable": true,
     "arguments": {"x-queue-type": "quorum", "x-delivery-limit": 3}},
    {"vhost": "größe", "name": "orders", "durable": true, "arguments": {"x-queue-type": "quorum", "x-dead-letter-exchange": "nosuch"}}
  ],
  "bindings": [{"source": "x", "vhost": "/", "destination": "orders", "destination_type": "queue", "routing_key": "", "arguments": {"name": "x"}}],
  "exchanges": [{"name": "y", "vhost": "/", "type": "fanout"}, {"name": "x", "vhost": "/", "type": "fanout", "arguments": {"alternate-exchange": "nosuch"}}],
  "policies": [{"vhost": "/", "name": "p", "pattern": "^zzz", "apply-to": "queues", "priority": 0, "definition": {"max-length": 5}}],
  "parameters": []
}
`

// -o sarif has a result for each finding, at the resource's place in the file.
func TestDoctorInSARIF(t *testing.T) {
	t.Parallel()
	for _, prefix := range []string{"", "\ufeff"} {
		path := file(t, "definitions.json", prefix+ailingFile)
		r := world{}.run("doctor", path, "-o", "sarif")
		assert.Equal(t, 1, r.code, r.stderr)
		log := readSARIF(t, r.stdout)
		rules := log.Runs[0].Tool.Driver.Rules
		assert.Len(t, rules, len(doctor.Rules()))
		found, fingerprints := map[string]string{}, map[string]bool{}
		lines := strings.Split(ailingFile, "\n")
		for _, result := range log.Runs[0].Results {
			assert.Equal(t, result.RuleID, rules[result.RuleIndex].ID)
			place := result.Locations[0].PhysicalLocation
			assert.Equal(t, "file://"+path, place.ArtifactLocation.URI)
			fingerprints[result.PartialFingerprints["hopback/v1"]] = true
			from, to := place.Region, []rune(lines[place.Region.EndLine-1])
			start := string([]rune(lines[from.StartLine-1])[from.StartColumn-1:])
			end := string(to[:from.EndColumn-1])
			assert.True(t, strings.HasPrefix(start, "{") && strings.HasSuffix(end, "}"), "%s ... %s", start, end)
			found[result.RuleID+" "+result.Locations[0].LogicalLocations[0].FullyQualifiedName] = start
		}
		assert.Len(t, fingerprints, len(log.Runs[0].Results))
		assert.Equal(t, lines[3][4:], found["dead-letter //queue/orders"])
		assert.Equal(t, lines[5][4:], found["dead-letter-exchange größe/queue/orders"])
		assert.Contains(t, found["alternate-exchange-missing //exchange/x"], `{"name": "x", "vhost": "/", "type": "fanout", "arg`)
		assert.Contains(t, found["policy-unmatched //policy/p"], `{"vhost": "/", "name": "p"`)
		assert.NotEmpty(t, log.Runs[0].Invocations[0].ToolExecutionNotifications, "what a file doesn't show")
	}

	// stdin and a live broker have no file, so findings name the resource alone.
	r := world{stdin: ailingFile}.run("doctor", "-", "-o", "sarif")
	assert.Equal(t, 1, r.code, r.stderr)
	for _, result := range readSARIF(t, r.stdout).Runs[0].Results {
		assert.Nil(t, result.Locations[0].PhysicalLocation)
	}
	b := hopbacktest.Start(t, hopbacktest.Config{})
	api := httptest.NewServer(b.HTTPHandler())
	t.Cleanup(api.Close)
	live := world{}.run("doctor", strings.Replace(api.URL, "http://", "http://guest:guest@", 1), "-o", "sarif")
	readSARIF(t, live.stdout)
	assert.Empty(t, live.stderr)

	for _, args := range []string{"doctor --rules -o sarif", "doctor --explain dead-letter -o sarif", "topology verify -o sarif"} {
		r := world{}.run(strings.Fields(args)...)
		assert.Equal(t, 64, r.code, args)
		assert.Empty(t, r.stdout, args)
	}
}

// action is a GitHub Action. An unknown key is an error.
type action struct {
	Name, Description, Author string
	Branding                  map[string]string
	Inputs                    map[string]struct {
		Description, Default string
		Required             bool
	}
	Outputs map[string]struct{ Description, Value string }
	Runs    struct {
		Using string
		Steps []struct {
			Name, ID, If, Uses, Shell, Run string
			With, Env                      map[string]string
		}
	}
}

// The action uses inputs that it has, all of them, and flags that doctor has. docs/doctor.md lists
// the inputs. Its script writes the report.
func TestGitHubAction(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(root + "/.github/actions/doctor/action.yml")
	require.NoError(t, err)
	var a action
	d := yaml.NewDecoder(strings.NewReader(string(text)))
	d.KnownFields(true)
	require.NoError(t, d.Decode(&a))
	assert.Equal(t, "composite", a.Runs.Using)
	page, err := os.ReadFile(root + "/docs/doctor.md")
	require.NoError(t, err)
	used := map[string]bool{}
	for _, m := range regexp.MustCompile(`inputs\.([a-z-]+)`).FindAllStringSubmatch(string(text), -1) {
		used[m[1]] = true
		assert.Contains(t, a.Inputs, m[1])
	}
	for name, input := range a.Inputs {
		assert.True(t, used[name], "the input %s does nothing", name)
		assert.NotEmpty(t, input.Description, name)
		assert.True(t, strings.Contains(string(page), "| `"+name+"` |"), "docs/doctor.md doesn't list the input %s", name)
	}
	script, flags := "", 0
	for _, step := range a.Runs.Steps {
		if step.ID == "doctor" {
			script = step.Run
		}
		if step.Run != "" {
			assert.Equal(t, "bash", step.Shell, step.Name)
			assert.NotContains(t, step.Run, "${{", "an input could inject commands; pass it in env")
		}
	}
	help := world{}.run("doctor", "--help").stdout
	for _, flag := range regexp.MustCompile(`--[a-z][a-z-]*`).FindAllString(script, -1) {
		flags++
		assert.Contains(t, help, " "+flag+" ")
	}
	assert.Equal(t, 4, flags)

	dir := t.TempDir()
	require.NoError(t, os.Mkdir(filepath.Join(dir, "hopback-doctor"), 0o700))
	build := exec.CommandContext(t.Context(), "go", "build", "-o", filepath.Join(dir, "hopback-doctor", "hopback"), root+"/cmd/hopback")
	out, err := build.CombinedOutput()
	require.NoError(t, err, "%s", out)
	run := func(name, waive string) (code int, output string) {
		outputs := filepath.Join(dir, "output")
		require.NoError(t, os.WriteFile(outputs, nil, 0o600))
		c := exec.CommandContext(t.Context(), "bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script)
		c.Dir = dir
		c.Env = append(os.Environ(), "RUNNER_TEMP="+dir, "GITHUB_OUTPUT="+outputs, "FILE="+name, "FAIL_ON="+a.Inputs["fail-on"].Default,
			"VHOST=/", "WAIVE="+waive, "SARIF=doctor.sarif")
		_, _ = c.CombinedOutput()
		written, err := os.ReadFile(outputs)
		require.NoError(t, err)
		return c.ProcessState.ExitCode(), string(written)
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "my definitions.json"), []byte(ailingFile), 0o600))
	code, output := run("my definitions.json", "")
	assert.Zero(t, code, "the step that reports findings fails, after the upload")
	assert.Equal(t, "exit-code=1\n", output)
	report, err := os.ReadFile(filepath.Join(dir, "doctor.sarif"))
	require.NoError(t, err)
	place := readSARIF(t, string(report)).Runs[0].Results[0].Locations[0].PhysicalLocation.ArtifactLocation
	assert.Equal(t, "my%20definitions.json", place.URI)
	assert.Equal(t, "%SRCROOT%", place.URIBaseID)

	code, output = run("my definitions.json", "dead-letter queue \"orders\"\n\npolicy-unmatched\n")
	assert.Zero(t, code)
	assert.Equal(t, "exit-code=0\n", output)
	code, output = run("none.json", "")
	assert.Equal(t, 64, code)
	assert.Empty(t, output)
}
