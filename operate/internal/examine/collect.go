package examine

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/operate/internal/facts"

	"github.com/hopback/hopback/internal/rules"
)

// A page has so many queues or exchanges, and so many pages are read.
const (
	pageSize = 500
	maxPages = 400
)

// ReadAll reads the virtual hosts that the user sees, or the one that is named, and the state of
// the cluster. It sends GET requests only: a dozen, and one per 500 queues and per 500 exchanges.
// r's own virtual host doesn't matter. Package operate/doctor calls it.
//
// An error means that queues, exchanges, or bindings couldn't be read. [Snapshot.Unread] and the
// cluster list what else is missing, and why.
func ReadAll(ctx context.Context, r rules.Reader, vhost string) ([]rules.Snapshot, facts.Cluster, error) {
	c := &collection{ctx: ctx, r: r, vhosts: map[string]*rules.Snapshot{}}
	c.cluster = facts.Cluster{Now: time.Now(), Unread: map[string]string{}, VHosts: map[string]facts.VHost{}}
	if vhost != "" {
		c.in = "/" + address.Escape(vhost)
	}
	if err := c.readVHosts(vhost); err != nil {
		return nil, c.cluster, err
	}
	for _, read := range []func() error{c.readQueues, c.readExchanges, c.readBindings} {
		if err := read(); err != nil {
			return nil, c.cluster, err
		}
	}
	c.readOverview()
	c.readNodes()
	c.readPolicies()
	c.readConsumers()
	c.readFeatures()
	if ctx.Err() != nil {
		return nil, c.cluster, context.Cause(ctx)
	}
	return c.finish(), c.cluster, nil
}

// collection is one ReadAll.
type collection struct {
	ctx     context.Context
	r       rules.Reader
	in      string // the end of a path for one virtual host
	names   []string
	vhosts  map[string]*rules.Snapshot
	cluster facts.Cluster
	// governed are virtual hosts in which a policy applies to an exchange.
	governed map[string]bool
}

func (c *collection) readVHosts(vhost string) error {
	type described struct {
		Name    string `json:"name"`
		Default string `json:"default_queue_type"`
	}
	var list []described
	switch vhost {
	case "":
		if err := rules.Get(c.ctx, c.r, "/vhosts?columns=name,default_queue_type", &list); err != nil {
			return err
		}
	default:
		one := described{Name: vhost}
		_ = rules.Get(c.ctx, c.r, "/vhosts"+c.in+"?columns=name,default_queue_type", &one) // it may exist nevertheless
		one.Name = vhost
		list = append(list, one)
	}
	for _, v := range list {
		if v.Name == "" {
			return rules.BadReply("/vhosts", "has a virtual host without a name")
		}
		rules.SetDefaultQueueType(c.of(v.Name), v.Default)
	}
	if len(list) == 0 {
		return fmt.Errorf("hopback: GET /api/vhosts: %w: the user sees no virtual host; give it a permission on those to examine, or the tag \"monitoring\"", declare.ErrForbidden)
	}
	return nil
}

// of is the snapshot of a virtual host. One that was created a moment ago wasn't listed.
func (c *collection) of(vhost string) *rules.Snapshot {
	s := c.vhosts[vhost]
	if s == nil {
		s = &rules.Snapshot{VHost: vhost}
		c.vhosts[vhost] = s
		c.names = append(c.names, vhost)
		c.cluster.VHosts[vhost] = facts.VHost{Queues: map[string]facts.Queue{}, Exchanges: map[string]facts.Exchange{}}
	}
	return s
}

// pages reads a listing page by page.
func pages[T any](c *collection, path, columns string, each func(T) error) error {
	for page := 1; ; page++ {
		var reply struct {
			Items []T  `json:"items"`
			Pages *int `json:"page_count"`
		}
		at := fmt.Sprintf("%s%s?page=%d&page_size=%d&columns=%s", path, c.in, page, pageSize, columns)
		err := rules.Get(c.ctx, c.r, at, &reply)
		switch {
		case page > 1 && errors.Is(err, declare.ErrBadReply) && c.shrunk(path, page):
			return nil
		case err != nil:
			return err
		}
		if reply.Items == nil || reply.Pages == nil {
			return rules.BadReply(path, "has no items or no page_count")
		}
		for _, item := range reply.Items {
			if err := each(item); err != nil {
				return err
			}
		}
		switch {
		case page >= *reply.Pages, len(reply.Items) == 0:
			return nil
		case page == maxPages:
			return fmt.Errorf("hopback: %s has more than %d pages of %d; name one virtual host", path, maxPages, pageSize)
		}
	}
}

// shrunk reports whether a listing has fewer pages by now. RabbitMQ refuses a page that doesn't exist,
// and things are deleted while they are read.
func (c *collection) shrunk(path string, page int) bool {
	var now struct {
		Pages int `json:"page_count"`
	}
	err := rules.Get(c.ctx, c.r, fmt.Sprintf("%s%s?page=1&page_size=%d&columns=name", path, c.in, pageSize), &now)
	return err == nil && now.Pages < page
}

// examinedQueue is httpQueue with more columns.
type examinedQueue struct {
	rules.HTTPQueue
	Bytes uint64 `json:"message_bytes"`
	Stats stats[struct {
		Acks *struct {
			Rate float64 `json:"rate"`
		} `json:"ack_details"`
		Redelivered struct {
			Rate float64 `json:"rate"`
		} `json:"redeliver_details"`
	}] `json:"message_stats"`
}

// stats are statistics. RabbitMQ writes [] for those that have none of the columns, for instance of a
// queue whose messages were never acknowledged.
type stats[T any] struct{ of T }

// UnmarshalJSON reads an object, or no statistics.
func (s *stats[T]) UnmarshalJSON(text []byte) error {
	if bytes.HasPrefix(text, []byte("[")) {
		return nil
	}
	return json.Unmarshal(text, &s.of)
}

const queueColumns = "name,vhost,type,durable,auto_delete,exclusive,leader,node,state,members,online,arguments,messages_ready,messages_unacknowledged,messages_dlx,messages_delayed,consumers,message_bytes,policy,operator_policy,effective_policy_definition,message_stats.ack_details.rate,message_stats.redeliver_details.rate"

func (c *collection) readQueues() error {
	return pages(c, "/queues", queueColumns, func(q examinedQueue) error {
		if q.Name == "" || q.VHost == "" {
			return rules.BadReply("/queues", "has a queue without a name or a virtual host")
		}
		s := c.of(q.VHost)
		here := c.cluster.VHosts[q.VHost].Queues
		if _, twice := here[q.Name]; twice {
			return nil // it moved to the next page
		}
		rules.AddQueue(s, q.HTTPQueue)
		f := facts.Queue{Bytes: q.Bytes, Policy: rules.RawArguments(q.Effective), Returned: q.Stats.of.Redelivered.Rate}
		if acks := q.Stats.of.Acks; acks != nil {
			f.AckRate, f.Rated = acks.Rate, true
		}
		here[q.Name] = f
		return nil
	})
}

type examinedExchange struct {
	rules.HTTPExchange
	VHost string `json:"vhost"`
	Stats stats[struct {
		In  uint64 `json:"publish_in"`
		Out uint64 `json:"publish_out"`
	}] `json:"message_stats"`
}

func (c *collection) readExchanges() error {
	c.governed = map[string]bool{}
	return pages(c, "/exchanges", "name,vhost,type,durable,auto_delete,internal,arguments,policy,operator_policy,message_stats.publish_in,message_stats.publish_out", func(x examinedExchange) error {
		if x.VHost == "" || x.Type == "" {
			return rules.BadReply("/exchanges", "has an exchange without a type or a virtual host")
		}
		s := c.of(x.VHost)
		here := c.cluster.VHosts[x.VHost].Exchanges
		if _, twice := here[x.Name]; twice || x.Name == "" {
			return nil
		}
		rules.AddExchange(s, x.HTTPExchange)
		here[x.Name] = facts.Exchange{In: x.Stats.of.In, Out: x.Stats.of.Out}
		c.governed[x.VHost] = c.governed[x.VHost] || x.User != "" || x.Operator != ""
		return nil
	})
}

func (c *collection) readBindings() error {
	var bindings []struct {
		rules.HTTPBinding
		VHost string `json:"vhost"`
	}
	if err := rules.Get(c.ctx, c.r, "/bindings"+c.in+"?columns=source,vhost,destination,destination_type,routing_key,arguments", &bindings); err != nil {
		return err
	}
	for _, b := range bindings {
		if b.Source != "" {
			s := c.of(b.VHost)
			s.Bindings = append(s.Bindings, b.Binding())
		}
	}
	return nil
}

// hideAll notes that a part couldn't be read, in each virtual host.
func (c *collection) hideAll(err error, part string) {
	for _, s := range c.vhosts {
		rules.Hide(s, err.Error(), part)
	}
}

func (c *collection) readOverview() {
	var overview struct {
		Version string `json:"rabbitmq_version"`
	}
	err := rules.Get(c.ctx, c.r, "/overview?columns=rabbitmq_version", &overview)
	if err == nil && overview.Version == "" {
		err = rules.BadReply("/overview", "has no rabbitmq_version")
	}
	if err != nil {
		c.hideAll(err, rules.PartVersion)
		return
	}
	c.cluster.Version = overview.Version
	for _, s := range c.vhosts {
		s.Version = overview.Version
	}
}

func (c *collection) readNodes() {
	var nodes []struct {
		Name          string   `json:"name"`
		Version       string   `json:"rabbitmq_version"`
		Running       bool     `json:"running"`
		MemoryAlarm   bool     `json:"mem_alarm"`
		DiskAlarm     bool     `json:"disk_free_alarm"`
		Partitions    []string `json:"partitions"`
		DiskFree      any      `json:"disk_free"`
		DiskFreeLimit any      `json:"disk_free_limit"`
		MemoryLimit   any      `json:"mem_limit"`
	}
	const columns = "name,rabbitmq_version,running,mem_alarm,disk_free_alarm,partitions,disk_free,disk_free_limit,mem_limit"
	err := rules.Get(c.ctx, c.r, "/nodes?columns="+columns, &nodes)
	if err == nil && len(nodes) == 0 {
		err = rules.BadReply("/nodes", "is empty")
	}
	if err != nil {
		c.hideAll(err, rules.PartNodes)
		c.cluster.Unread[facts.Alarms] = err.Error()
		return
	}
	for _, n := range nodes {
		c.cluster.Nodes = append(c.cluster.Nodes, facts.Node{
			Name: n.Name, Version: n.Version, Running: n.Running, MemoryAlarm: n.MemoryAlarm, DiskAlarm: n.DiskAlarm, Partitioned: n.Partitions,
			DiskFree: number(n.DiskFree), DiskFreeLimit: number(n.DiskFreeLimit), MemoryLimit: number(n.MemoryLimit),
		})
		for _, s := range c.vhosts {
			s.Nodes = append(s.Nodes, n.Name)
		}
	}
}

// number is a number, which the broker writes as a text where it doesn't know it.
func number(v any) int64 {
	n, _ := rules.JSONValue(v).(int64)
	return n
}

func (c *collection) readPolicies() {
	for _, p := range []struct {
		path     string
		operator bool
	}{{"/policies", false}, {"/operator-policies", true}} {
		var policies []declare.Policy
		if err := rules.Get(c.ctx, c.r, p.path+c.in, &policies); err != nil {
			c.cluster.Unread[facts.Policies] = err.Error()
			continue
		}
		for _, policy := range policies {
			policy.Operator = p.operator
			policy.Definition = rules.JSONArguments(policy.Definition)
			s := c.of(policy.VHost)
			s.Policies = append(s.Policies, policy)
		}
	}
}

func (c *collection) readConsumers() {
	var consumers []struct {
		Queue struct {
			Name  string `json:"name"`
			VHost string `json:"vhost"`
		} `json:"queue"`
		Prefetch    int64 `json:"prefetch_count"`
		AckRequired bool  `json:"ack_required"`
		// Channel is an object with a number for AMQP 0-9-1. Credit of AMQP 1.0 isn't shown.
		Channel json.RawMessage `json:"channel_details"`
	}
	const columns = "queue.name,queue.vhost,prefetch_count,ack_required,channel_details.number"
	if err := rules.Get(c.ctx, c.r, "/consumers"+c.in+"?columns="+columns, &consumers); err != nil {
		c.cluster.Unread[facts.Consumers] = err.Error()
		return
	}
	for _, consumer := range consumers {
		here := c.cluster.VHosts[consumer.Queue.VHost].Queues
		q, known := here[consumer.Queue.Name]
		if !known {
			continue
		}
		var channel struct {
			Number int64 `json:"number"`
		}
		old := json.Unmarshal(consumer.Channel, &channel) == nil && channel.Number > 0
		switch {
		case !consumer.AckRequired:
			q.AutoAck++
		case old && consumer.Prefetch == 0:
			q.Unlimited++
		}
		here[consumer.Queue.Name] = q
	}
}

func (c *collection) readFeatures() {
	var used []struct {
		Name        string `json:"name"`
		Description string `json:"desc"`
	}
	if err := rules.Get(c.ctx, c.r, "/deprecated-features/used", &used); err != nil {
		c.cluster.Unread[facts.Features] = err.Error()
	}
	for _, f := range used {
		c.cluster.Deprecated = append(c.cluster.Deprecated, facts.Deprecated{Name: f.Name, Description: f.Description})
	}
	var flags []struct {
		Name      string `json:"name"`
		State     string `json:"state"`
		Stability string `json:"stability"`
	}
	if err := rules.Get(c.ctx, c.r, "/feature-flags", &flags); err != nil {
		c.cluster.Unread[facts.Flags] = err.Error()
	}
	for _, f := range flags {
		if f.State == "disabled" && f.Stability == "stable" {
			c.cluster.DisabledFlags = append(c.cluster.DisabledFlags, f.Name)
		}
	}
}

// finish returns the snapshots, sorted.
func (c *collection) finish() []rules.Snapshot {
	slices.Sort(c.names)
	var all []rules.Snapshot
	for _, name := range c.names {
		s := c.vhosts[name]
		if why := c.cluster.Unread[facts.Policies]; why != "" && c.governed[name] {
			rules.Hide(s, why, rules.PartPolicies) // the queues show what applies to them, and exchanges don't
		}
		rules.Sort(s)
		all = append(all, *s)
	}
	slices.SortFunc(c.cluster.Nodes, func(a, b facts.Node) int { return cmp.Compare(a.Name, b.Name) })
	return all
}
