package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"
)

// The formats of --output.
const (
	formatText = "text"
	formatJSON = "json"
	formatYAML = "yaml"
)

// outputFlag adds --output, in which the command prints what. more are formats besides text, JSON,
// and YAML.
func (c *command) outputFlag(cmd *cobra.Command, what string, more ...string) {
	formats := append([]string{formatText, formatJSON, formatYAML}, more...)
	c.format = formatText
	list := strings.Join(formats[:len(formats)-1], ", ") + ", or " + formats[len(formats)-1]
	cmd.Flags().VarP(&choice{&c.format, formats}, "output", "o", "print "+what+" in this `format`: "+list)
	cmd.Flags().BoolFunc("json", "the same as --output json", func(text string) error {
		on, err := strconv.ParseBool(text)
		if on {
			c.format = formatJSON
		}
		return err
	})
	_ = cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(formats, cobra.ShellCompDirectiveNoFileComp))
}

// choice is a flag with a fixed set of values.
type choice struct {
	value   *string
	allowed []string
}

func (o *choice) String() string { return *o.value }

func (o *choice) Type() string { return "string" }

func (o *choice) Set(text string) error {
	if !slices.Contains(o.allowed, text) {
		return fmt.Errorf("use one of %s", strings.Join(o.allowed, ", "))
	}
	*o.value = text
	return nil
}

// structured reports whether results are printed for programs.
func (c *command) structured() bool { return c.format == formatJSON || c.format == formatYAML }

// printStructured writes v to stdout in the format of --output. YAML has the same names and values
// as JSON.
func (c *command) printStructured(v any) error {
	if c.format != formatYAML {
		return c.printDocument(v)
	}
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if text, err = yamlOf(text); err != nil {
		return err
	}
	if c.wrote {
		text = append([]byte("---\n"), text...)
	}
	c.wrote = true
	_, err = c.stdout.w.Write(text)
	return err
}

// printDocument writes v to stdout as JSON.
func (c *command) printDocument(v any) error {
	c.wrote = true
	text, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	_, err = c.stdout.w.Write(append(text, '\n'))
	return err
}

// yamlOf converts JSON to YAML, with the order of its members.
func yamlOf(text []byte) ([]byte, error) {
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	node, err := yamlNode(d)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	e := yaml.NewEncoder(&b)
	e.SetIndent(2)
	if err := e.Encode(node); err != nil {
		return nil, err
	}
	return b.Bytes(), e.Close()
}

// yamlNode reads one value.
func yamlNode(d *json.Decoder) (*yaml.Node, error) {
	token, err := d.Token()
	if err != nil {
		return nil, err
	}
	scalar := func(tag, value string) (*yaml.Node, error) {
		return &yaml.Node{Kind: yaml.ScalarNode, Tag: tag, Value: value}, nil
	}
	switch t := token.(type) {
	case json.Delim:
		node := &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map"}
		if t == '[' {
			node = &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq"}
		}
		for d.More() { // the name of a member is a value, too
			value, err := yamlNode(d)
			if err != nil {
				return nil, err
			}
			node.Content = append(node.Content, value)
		}
		_, err := d.Token()
		return node, err
	case json.Number:
		if strings.ContainsAny(t.String(), ".eE") {
			return scalar("!!float", t.String())
		}
		return scalar("!!int", t.String())
	case string:
		var node yaml.Node
		return &node, node.Encode(t) // quotes what some parsers read as something else, such as no
	case bool:
		return scalar("!!bool", strconv.FormatBool(t))
	}
	return scalar("!!null", "null")
}
