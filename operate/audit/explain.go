package audit

import "github.com/hopback/hopback/operate/internal/examine"

// Rule is one check of Verify in package check, of the doctor, or of both. Rules find configuration that loses
// messages or blocks them permanently, not matters of style.
type Rule struct {
	// ID is the rule's name, in findings and in the waive argument of Verify.
	ID string `json:"id"`
	// Severity is "error" if messages are lost or blocked, or will be, and "warning" if that
	// happens only once something else fails as well. It is empty if Verify doesn't run the rule.
	Severity string `json:"severity,omitempty"`
	// Examined is the severity for virtual hosts of any application. It can also be "note" for
	// what loses nothing by itself. It is empty if the doctor doesn't run the rule.
	Examined string `json:"examined,omitempty"`
	// Summary is what should be true, and Remedy how to fix it. Each is a sentence without a full
	// stop.
	Summary string `json:"summary"`
	Remedy  string `json:"remedy"`

	Explanation
}

// Explanation is for people who see a rule for the first time.
type Explanation struct {
	// Happens is what happens to messages.
	Happens string `json:"happens,omitempty"`
	// Reproduce is how to see it on a test broker.
	Reproduce string `json:"reproduce,omitempty"`
	// Fix is a command, with names in capitals to replace.
	Fix string `json:"fix,omitempty"`
	// Docs is the URL of RabbitMQ's documentation.
	Docs string `json:"docs,omitempty"`
}

// Rules returns every rule of Verify in package check, in the order in which it runs them.
func Rules() []Rule { return rulesFor(func(r Rule) bool { return r.Severity != "" }) }

// ExamineRules returns every rule that the doctor runs, in the order in which it runs them.
func ExamineRules() []Rule { return rulesFor(func(r Rule) bool { return r.Examined != "" }) }

func rulesFor(which func(Rule) bool) []Rule {
	var list []Rule
	for _, e := range examine.Table() {
		r := Rule{ID: e.ID, Severity: e.Severity, Examined: e.Examined, Summary: e.Summary, Remedy: e.Remedy, Explanation: explanations[e.ID]}
		if which(r) {
			list = append(list, r)
		}
	}
	return list
}

// Pages of RabbitMQ's documentation.
const (
	docsDLX      = "https://www.rabbitmq.com/docs/dlx"
	docsSafe     = "https://www.rabbitmq.com/docs/quorum-queues#dead-lettering"
	docsPoison   = "https://www.rabbitmq.com/docs/quorum-queues#poison-message-handling"
	docsQuorum   = "https://www.rabbitmq.com/docs/quorum-queues"
	docsReplicas = "https://www.rabbitmq.com/docs/quorum-queues#replica-management"
	docsTTL      = "https://www.rabbitmq.com/docs/ttl"
	docsLength   = "https://www.rabbitmq.com/docs/maxlength"
	docsAE       = "https://www.rabbitmq.com/docs/ae"
	docsPolicy   = "https://www.rabbitmq.com/docs/policies"
	docsQueues   = "https://www.rabbitmq.com/docs/queues"
	docsRoute    = "https://www.rabbitmq.com/docs/exchanges"
	docsAlarm    = "https://www.rabbitmq.com/docs/alarms"
	docsDisk     = "https://www.rabbitmq.com/docs/disk-alarms"
	docsCluster  = "https://www.rabbitmq.com/docs/clustering"
	docsRelease  = "https://www.rabbitmq.com/release-information"
)

// setPolicy begins the command that sets a policy.
const setPolicy = `rabbitmqctl set_policy --vhost VHOST --apply-to `

// machineVersions is a command that lists the machine versions of quorum queues. One whose leader
// doesn't answer is missing. TestDoctorNamesDisabledFeatureFlags runs it.
const machineVersions = `rabbitmqctl eval '[{amqqueue:get_name(Q), maps:get(effective_machine_version, M)} || Q <- rabbit_amqqueue:list_by_type(rabbit_quorum_queue), {ok, M, _} <- [ra:member_overview(amqqueue:get_pid(Q))]].'`

var explanations = map[string]Explanation{
	"ill-typed-argument": {
		"The broker accepts an argument with the wrong type, and uses its default. A delivery limit that is the text \"2\" is no limit on 4.0, and 20 on 4.3.",
		"Declare a quorum queue with x-delivery-limit \"2\", as text, and reject a message more than twice with requeue.",
		`rabbitmqadmin --vhost VHOST queues declare --name NEW_QUEUE --type quorum --durable true --arguments '{"x-delivery-limit": 2}'`, docsQuorum,
	},
	"unknown-argument": {
		"The broker accepts any argument and ignores those it doesn't know. A misspelled x-message-ttl means that messages never expire.",
		"Declare a queue with x-mesage-ttl 100, publish a message, and wait: it stays.",
		"", docsQueues,
	},
	"policy-pattern": {
		"A definitions file doesn't say to which queues a policy applies. If its pattern has a back reference, a condition, or recursion, only a broker can tell.",
		"Write a policy with the pattern ^(a|b)\\1$ to a definitions file with a queue aa, and examine the file.",
		"rabbitmqctl list_queues --vhost VHOST name policy operator_policy", docsPolicy,
	},
	"dead-letter": {
		"A message that is rejected, expires, or comes back more often than the delivery limit allows is deleted, without a trace. A quorum queue has a delivery limit of 20 unless you set another.",
		"Declare a quorum queue with x-delivery-limit 1 and no dead-letter exchange, publish a message, and get it three times with requeue: the queue is empty.",
		setPolicy + `queues NAME '^QUEUE$' '{"dead-letter-exchange": "DLX", "dead-letter-routing-key": "QUEUE"}'`, docsPoison,
	},
	"at-most-once": {
		"The broker removes a dead letter before its target has it. If the exchange, the binding, or the target is missing or unavailable at that moment, the message is lost.",
		"Let a queue dead-letter to an exchange with no binding, and reject a message: it is gone. With at-least-once it waits.",
		setPolicy + `quorum_queues NAME '^QUEUE$' '{"dead-letter-strategy": "at-least-once", "overflow": "reject-publish", "dead-letter-exchange": "DLX"}'`, docsSafe,
	},
	"drop-head-at-least-once": {
		"at-least-once needs overflow reject-publish. With drop-head, the default, the broker silently falls back to at-most-once, and a dead letter without a target is lost.",
		"Declare a quorum queue with x-dead-letter-strategy at-least-once, no x-overflow, and a dead-letter exchange without bindings. Reject a message: it is gone.",
		setPolicy + `quorum_queues NAME '^QUEUE$' '{"overflow": "reject-publish"}'`, docsSafe,
	},
	"dead-letter-exchange": {
		"Dead letters have nowhere to go. With at-most-once they are lost; with at-least-once they stay, and 32 of them block all others in the queue.",
		"Declare a queue whose x-dead-letter-exchange doesn't exist, and reject a message.",
		`rabbitmqadmin --vhost VHOST exchanges declare --name DLX --type fanout --durable true`, docsDLX,
	},
	"dead-letter-route": {
		"The dead-letter exchange exists, but no binding matches the dead letters. With at-most-once they are lost; with at-least-once they stay, and 32 of them block all others in the queue.",
		"Declare a direct exchange without bindings, a queue that dead-letters to it, and reject a message.",
		`rabbitmqadmin --vhost VHOST bindings declare --source DLX --destination-type queue --destination DEAD_QUEUE --routing-key KEY`, docsDLX,
	},
	"alternate-exchange": {
		"Dead letters whose key matches no binding are lost, or block others. A new publisher can bring such a key, and so can the deletion of a queue.",
		"Let a queue dead-letter to a direct exchange with a binding for one key. Reject a message that has another key.",
		setPolicy + `exchanges NAME '^DLX$' '{"alternate-exchange": "UNROUTED"}'`, docsAE,
	},
	"alternate-exchange-missing": {
		"The alternate exchange should get what matches no binding, and doesn't exist. The broker drops those messages.",
		"Declare an exchange with an alternate-exchange that doesn't exist, and publish to it without a binding.",
		`rabbitmqadmin --vhost VHOST exchanges declare --name UNROUTED --type fanout --durable true`, docsAE,
	},
	"alternate-exchange-route": {
		"The alternate exchange has no binding to a queue, so it drops what it gets.",
		"Declare an exchange with an alternate exchange that has no binding, and publish to it.",
		`rabbitmqadmin --vhost VHOST bindings declare --source UNROUTED --destination-type queue --destination PARKING`, docsAE,
	},
	"foreign-binding": {
		"hopback's exchanges route some messages to their alternate exchange, which gets only what matches no binding, or to one of several bindings. So a queue that others bind there takes messages silently. If it is bound to the retry exchange and refuses messages when it is full, retries multiply.",
		"Apply retry.Topology, and bind a queue to dead_letter_exchange.sort without headers: the dead-letter queues get nothing any more.",
		`rabbitmqadmin --vhost VHOST bindings delete --source EXCHANGE --destination-type queue --destination QUEUE`, docsAE,
	},
	"delivery-limit": {
		"A dead letter keeps its delivery count. On a dead-letter queue with a limit, a message that reached the work queue's limit is dropped as soon as somebody reads and requeues it.",
		"Let a queue with x-delivery-limit 1 dead-letter to a quorum queue with x-delivery-limit 1. Get the dead letter with requeue, twice: it is gone.",
		setPolicy + `quorum_queues NAME '^DEAD_QUEUE$' '{"delivery-limit": -1}'    # unless an argument sets a limit; that needs a new queue`, docsPoison,
	},
	"max-length": {
		"While a queue that receives dead letters, or delays messages, is full, dead letters for it are lost (at-most-once), or 32 of them block all others (at-least-once).",
		"Give a dead-letter queue x-max-length 1 and x-overflow reject-publish, let an at-least-once queue dead-letter to it, and reject three messages: they wait in their first queue.",
		`rabbitmqctl clear_policy --vhost VHOST NAME    # if a policy sets it; an argument needs a new queue`, docsLength,
	},
	"delayed-drop-head": {
		"RabbitMQ 4.4 holds messages with x-opt-delivery-time in quorum queues. If they alone exceed the queue's length limit with drop-head, the queue hangs and uses all of a CPU core. Anyone who may publish can cause that.",
		"On 4.4, declare a quorum queue with x-max-length 2, and publish three messages with an x-opt-delivery-time in an hour.",
		setPolicy + `quorum_queues NAME '^QUEUE$' '{"overflow": "reject-publish"}'`, docsLength,
	},
	"overflow": {
		"When the queue is full, the broker deletes its oldest message for each new one. Publishers get a confirm, and don't notice.",
		"Declare a queue with x-max-length 1, and publish two messages: the first one is gone.",
		setPolicy + `queues NAME '^QUEUE$' '{"overflow": "reject-publish"}'`, docsLength,
	},
	"expires": {
		"A queue that nobody consumes from, redeclares, or gets from for that long is deleted with its messages. A delay queue has no consumers, so it is deleted while messages wait in it. Redeclaring a classic queue renews its lease.",
		"Declare a queue with x-expires 1000, publish a message, and wait two seconds.",
		`rabbitmqctl clear_policy --vhost VHOST NAME    # if a policy sets it; an argument needs a new queue`, docsTTL,
	},
	"expiry-cycle": {
		"A message that returns to a queue by expiry alone, without a rejection, is dropped by the broker's cycle detection (at-most-once) or kept in the queue forever (at-least-once).",
		"Declare two queues with x-message-ttl that dead-letter to each other, and publish a message: after one round it is gone.",
		"", docsDLX,
	},
	"dead-letter-cycle": {
		"A rejected message is back in its queue at once, is delivered, and is rejected again: a hot loop that only a consumer can end. The delivery limit doesn't, because the queue dead-letters to itself.",
		"Declare a queue with x-dead-letter-exchange \"\" and its own name as x-dead-letter-routing-key. Reject a message: it is back.",
		setPolicy + `queues NAME '^QUEUE$' '{"dead-letter-exchange": "DLX", "dead-letter-routing-key": "DEAD_QUEUE"}'    # unless arguments set them; these need a new queue`, docsDLX,
	},
	"endless-retry": {
		"The queue retries by a queue with a message TTL. That works, but nothing in the broker counts: a message that always fails circles until a consumer checks x-death and stops it.",
		"Declare a work queue that dead-letters to a queue with x-message-ttl, which dead-letters back. Reject each time: the message never stops.",
		"hopback retry run topology.yaml    # counts, and dead-letters after max-retries", docsDLX,
	},
	"no-delivery-limit": {
		"A message that crashes its consumer is redelivered without end, and each crash takes the prefetched neighbors along.",
		"Declare a quorum queue with x-delivery-limit -1, publish a message, and get it with requeue a hundred times.",
		setPolicy + `quorum_queues NAME '^QUEUE$' '{"delivery-limit": 20, "dead-letter-exchange": "DLX"}'`, docsPoison,
	},
	"per-message-ttl": {
		"A queue expires messages at its head only. A message with an expiration of 10 minutes in front blocks one of a second behind it. A message without an expiration never leaves, and all behind it stay.",
		"Publish to the queue with an expiration of 60000, then with 100. After a second, nothing has left.",
		`rabbitmqadmin --vhost VHOST queues declare --name retry.10s --type quorum --durable true --arguments '{"x-message-ttl": 10000, "x-dead-letter-exchange": "RETURN"}'`, docsTTL + "#per-message-ttl-caveats",
	},
	"delay-without-ttl": {
		"The queue's name says that it delays messages, but without a message TTL they stay until their own expiration, or forever.",
		"Publish a message without an expiration to the queue, and wait.",
		setPolicy + `queues NAME '^QUEUE$' '{"message-ttl": 10000}'`, docsTTL,
	},
	"unread-dead-letters": {
		"Failed messages pile up, and nobody notices before the customers do.",
		"Reject a message whose queue has a dead-letter queue, and do nothing.",
		"hopback dlq survey    # what failed, and why\nhopback dlq replay DEAD_QUEUE --all", docsDLX,
	},
	"delayed-message-plugin": {
		"The plugin keeps pending messages in a table on a single node. They are lost with that node, and aren't counted anywhere. The plugin is archived and depends on Mnesia, which RabbitMQ 4.3 doesn't use. If an upgrade leaves the exchange without the plugin, publishing to it ends the publisher's session.",
		"With the plugin, publish a message with x-delay, and delete the node's data.",
		"", "https://github.com/rabbitmq/rabbitmq-delayed-message-exchange",
	},
	"unbound-exchange": {
		"The broker drops a message that no binding matches. It reports success to the publisher, unless that sets mandatory or uses AMQP 1.0.",
		"Declare an exchange, and publish to it.",
		setPolicy + `exchanges NAME '^EXCHANGE$' '{"alternate-exchange": "UNROUTED"}'`, docsRoute,
	},
	"unrouted-exchange": {
		"Messages were published to the exchange, and none of them matched a binding. The broker dropped them.",
		"Bind a queue with the key a, and publish with the key b.",
		setPolicy + `exchanges NAME '^EXCHANGE$' '{"alternate-exchange": "UNROUTED"}'`, docsAE,
	},
	"policy-conflict": {
		"The queue and the policy differ. Of two numbers usually the smaller counts, of other settings the argument, and of overflow on a quorum queue the policy. Somebody may rely on the other one.",
		"Declare a queue with x-message-ttl 3600000, and set a policy with message-ttl 500: the message is gone after half a second.",
		"rabbitmqctl clear_policy --vhost VHOST NAME", docsPolicy,
	},
	"policy-tie": {
		"Policies aren't merged: one applies to a queue, and the others don't. With the same priority it isn't defined which, so a dead-letter exchange can disappear when a policy is set again.",
		"Set two policies of one priority that match one queue, one with a dead-letter exchange and one with a length limit.",
		setPolicy + `queues --priority 10 NAME PATTERN DEFINITION`, docsPolicy,
	},
	"policy-not-applied": {
		"A policy with one key that a queue's type doesn't have doesn't apply to that queue at all. Its dead-letter exchange, for instance, is missing there.",
		"Set a policy with delivery-limit and dead-letter-exchange for all queues, and reject a message of a classic queue: it is gone.",
		setPolicy + `quorum_queues NAME PATTERN DEFINITION`, docsPolicy,
	},
	"policy-unmatched": {
		"The policy does nothing. Often its pattern has a typo, and queues lack what it should set.",
		"Set a policy with the pattern ^oders$, and list the policy of the queue orders.",
		setPolicy + `queues NAME '^QUEUE$' DEFINITION`, docsPolicy,
	},
	"transient-queue": {
		"A restart of its node deletes the queue and its messages. RabbitMQ 4.4 refuses such queues, and doesn't start on a node that has one in its metadata.",
		"Declare a queue that isn't durable, publish a message, and restart the node.",
		`rabbitmqctl list_queues --vhost VHOST name durable exclusive    # then redeclare these`, "https://www.rabbitmq.com/docs/queues#durability",
	},
	"queue-down": {
		"The queue neither accepts nor delivers messages. Publishers to it get no confirms.",
		"Stop the node of a classic queue, on a cluster, or two of the three nodes of a quorum queue.",
		"rabbitmq-diagnostics cluster_status", docsCluster,
	},
	"unacked-pile-up": {
		"Messages that a consumer holds without acknowledging them go to nobody else, stay on disk, and come back in the same order when the connection ends: usually to the next consumer that hangs.",
		"Consume with a prefetch of 2000 and never acknowledge.",
		"", "https://www.rabbitmq.com/docs/consumers",
	},
	"impossible-queue": {
		"RabbitMQ refuses a quorum queue or a stream that is auto-delete or not durable. An import of definitions reports success, and leaves the queue out: what is published for it is dropped.",
		"Import a document with a queue that has x-queue-type quorum and auto_delete true: it isn't there.",
		"", docsQuorum,
	},
	"returned-without-end": {
		"A consumer that returns what it can't handle gets it again at once: a hot loop, and everything behind those messages waits. Since 4.3, quorum queues count only what failed: a rejection with requeue or a lost connection, but not basic.nack with requeue, nor the outcome released.",
		"On 4.3, declare a quorum queue with x-delivery-limit 2, publish a message, and call basic.nack with requeue each time: it never stops.",
		"", docsPoison,
	},
	"default-queue-type": {
		"A virtual host's default queue type applies only to queues that can have it. A quorum queue or a stream can't be auto-delete or transient, so a client that declares such a queue without a type gets a classic one: with one copy, and without a delivery limit.",
		"Create a virtual host with the default queue type quorum, and declare an auto-delete queue in it.",
		"", docsQueues,
	},
	"no-prefetch-limit": {
		"The broker sends a new consumer everything that is ready. That consumer runs out of memory and crashes, everything is requeued, and the next consumer gets it. Other consumers get nothing.",
		"Publish 5000 messages, and consume over AMQP 0-9-1 without basic.qos: all of them are unacknowledged at once.",
		"", "https://www.rabbitmq.com/docs/consumer-prefetch",
	},
	"auto-ack": {
		"The broker forgets a message once it has sent it. What is in the socket, or in a consumer that crashes, is lost.",
		"Consume with no-ack, stop reading, and close the connection: the queue is empty.",
		"", "https://www.rabbitmq.com/docs/confirms",
	},
	"oversized-queue": {
		"The queue grows until the memory or disk alarm blocks every publisher of the cluster.",
		"Publish without a consumer.",
		setPolicy + `queues NAME '^QUEUE$' '{"max-length": 1000000, "overflow": "reject-publish"}'`, docsLength,
	},
	"unread-queue": {
		"Messages wait for a consumer that doesn't exist, and pile up.",
		"Bind a queue, and publish without a consumer.",
		"", docsQueues,
	},
	"stream-retention": {
		"A stream keeps everything. Without a limit it grows until the disk is full, and the disk alarm blocks every publisher of the cluster.",
		"Declare a stream without arguments, and publish.",
		setPolicy + `streams NAME '^STREAM$' '{"max-age": "7D", "max-length-bytes": 10000000000}'`, "https://www.rabbitmq.com/docs/streams#retention",
	},
	"delay-mismatch": {
		"The binding key or the declaration promises one delay, and the queue holds messages for another, or forever.",
		"Bind a queue with x-message-ttl 60000 by the key delay.1000.#.",
		"", docsTTL,
	},
	"several-ways-back": {
		"A delayed message returns to several queues, as several copies. If other work queues are among them, their workers handle messages that aren't theirs.",
		"Bind two queues to the exchange that a delay queue dead-letters to, one of them with #.",
		"", docsRoute,
	},
	"work-queue-ttl": {
		"Messages that wait in the work queue for their retry expire before it.",
		"Set a policy with message-ttl 100 on a quorum queue whose worker delays retries with x-opt-delivery-time, on 4.3.",
		setPolicy + `queues NAME PATTERN_WITHOUT_QUEUE '{"message-ttl": 100}'`, docsTTL,
	},
	"shared-ladder": {
		"An exchange of a ladder of delay queues has bindings of another ladder. A message matches both, and becomes two, four, or more.",
		"Declare two ladders with different numbers of levels on the same exchanges.",
		"", docsRoute,
	},
	"wildcard-name": {
		"The queue's name is a word * or # in a topic binding, so the queue gets the messages of all others.",
		"Name a queue #, and bind it with the key *.*.#.",
		"", docsRoute,
	},
	"transient-exchange": {
		"A restart, or the removal of its last binding, deletes the exchange with its bindings to durable queues. Publishers then get errors, or their messages are dropped.",
		"Declare an auto-delete exchange, bind a durable queue, remove the binding: the exchange is gone.",
		`rabbitmqadmin --vhost VHOST exchanges declare --name EXCHANGE --type TYPE --durable true`, docsRoute,
	},
	"not-replicated": {
		"A classic queue has one copy on one node. While the node is down, so is the queue; if its disk is lost, so are the messages.",
		"On a cluster, stop the node that has the queue.",
		`rabbitmqadmin --vhost VHOST queues declare --name NEW_QUEUE --type quorum --durable true    # hopback topology migrate moves the messages`, docsQuorum,
	},
	"replicas": {
		"A quorum queue or a stream with one replica stops with its node; with two it stops with either of them.",
		"Declare a quorum queue with x-quorum-initial-group-size 1 on a cluster of three.",
		"rabbitmq-queues grow NODE all --vhost-pattern VHOST --queue-pattern QUEUE", docsReplicas,
	},
	"replicas-down": {
		"With a majority of its replicas down, the queue neither accepts nor delivers messages. With a minority down, the next failure stops it.",
		"Stop one of three nodes, then another.",
		"rabbitmq-queues check_if_node_is_quorum_critical", docsReplicas,
	},
	"stuck-dead-letters": {
		"Dead letters wait for a target that is missing or full. A queue has 32 of them in flight: if none can be delivered, all others wait, for any target.",
		"Let an at-least-once queue dead-letter to an exchange without bindings, and reject 32 messages.",
		`rabbitmqctl list_queues --vhost VHOST name messages_dlx`, docsSafe,
	},
	"broker-version": {
		"Before 4.0.6, a session can keep sending to the deposed leader of a queue after a node was frozen. Publishers and consumers get no answer until they reconnect.",
		"On a cluster with 4.0.5, freeze a leader's node for ten seconds, and go on publishing.",
		"", "https://github.com/rabbitmq/rabbitmq-server/pull/13095",
	},
	"delayed-retry": {
		"The argument belongs to a later version. The broker accepts it, and retries at once instead of delaying.",
		"Declare a queue with x-delayed-retry-type on 4.2.",
		"", docsQuorum,
	},
	"memory-alarm": {
		"A node uses more memory than its limit, and blocks all publishers of the cluster. Retries that publish wait; consumers continue.",
		"rabbitmqctl set_vm_memory_high_watermark 0.0001",
		"rabbitmq-diagnostics memory_breakdown", docsAlarm,
	},
	"disk-alarm": {
		"A node has less free disk space than its limit, and blocks all publishers of the cluster.",
		"rabbitmqctl set_disk_free_limit 1000GB",
		"rabbitmqctl list_queues --vhost VHOST name messages message_bytes_persistent", docsDisk,
	},
	"disk-limit": {
		"The default of 50 MB is for development. A burst fills it between two checks; then the node crashes, and may not start again without space.",
		"Fill the disk of a test node while publishing.",
		"rabbitmqctl set_disk_free_limit mem_relative 1.0", docsDisk,
	},
	"node-down": {
		"Classic queues of the node are unavailable, and quorum queues have a replica less: the next failure may stop them.",
		"Stop a node of a cluster.",
		"rabbitmq-diagnostics cluster_status", docsCluster,
	},
	"partition": {
		"Nodes that lost contact have different views of queues and bindings, and can accept messages that the other side never sees.",
		"Cut the network between two nodes of a test cluster.",
		"rabbitmq-diagnostics cluster_status", "https://www.rabbitmq.com/docs/partitions",
	},
	"two-nodes": {
		"One of two nodes isn't a majority. Quorum queues, streams, and the metadata stop when either node stops, so two are less available than one.",
		"Stop one of two nodes, and publish to a quorum queue.",
		"rabbitmqctl join_cluster NODE    # on a third node", docsCluster,
	},
	"leaders-on-one-node": {
		"One node does nearly all the work, and all queues fail over at once when it stops. Clients that declare queues over one connection cause it.",
		"Declare ten queues over one connection to a cluster of three.",
		"rabbitmq-queues rebalance quorum", "https://www.rabbitmq.com/docs/quorum-queues#leader-placement",
	},
	"unsupported-version": {
		"There are no more fixes for bugs and security in public releases. Several known faults that lose or block messages are fixed in later versions.",
		"rabbitmq-diagnostics server_version",
		"rabbitmqctl list_feature_flags name state stability    # before the upgrade: see hopback doctor --explain disabled-feature-flags", docsRelease,
	},
	"deprecated-feature": {
		"The next versions refuse the feature, or a node that uses it doesn't start.",
		"Declare a transient queue that isn't exclusive, on 4.3.",
		"rabbitmqctl list_deprecated_features --used", "https://www.rabbitmq.com/docs/deprecated-features",
	},
	"disabled-feature-flags": {
		"The node lacks what the flag enables. A node of a later version that requires it may refuse to start or to join. But enabling rabbitmq_4.0.0 permanently breaks each quorum queue whose machine version is still below 4: consumers crash it at every start, and publishers get confirms for messages that it drops (https://github.com/rabbitmq/rabbitmq-server/issues/17504). A replica that never answered after the upgrade, or was removed while its node was off, keeps a queue there.",
		"rabbitmqctl list_feature_flags",
		machineVersions + "    # lists all quorum queues: none may be missing, or have a version below 4\nrabbitmqctl enable_feature_flag FLAG", "https://www.rabbitmq.com/docs/feature-flags",
	},
}
