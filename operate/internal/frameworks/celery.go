package frameworks

import (
	"fmt"
	"strings"

	"github.com/hopback/hopback/declare"
)

const celeryCure = "Celery acknowledges a task before it runs, and publishes a copy to retry it. For retries that survive a worker's crash, set task_acks_late and task_reject_on_worker_lost, raise Reject(requeue=False) in the task, and let the central retrier delay it."

// celery recognizes Celery's task queues, remote control (kombu/pidbox.py), and delayed delivery
// (kombu/transport/native_delayed_delivery.py, kombu 5.6), which Celery 5.5 and later declares
// if a queue is a quorum queue:
//
//	celery_delayed_27 … _0    topic exchange, queue   a ladder, down to
//	celery_delayed_delivery   topic exchange          bound by "#.<key>" to the tasks' exchanges
//	celery.pidbox             fanout exchange         workers' control queues
//	reply.celery.pidbox       direct exchange
//	celeryev                  topic exchange          events
//	<queue>                   direct exchange, queue  bound by its own name
func (v *view) celery() []*match {
	m := newMatch()
	m.central, m.cure = true, celeryCure
	v.celeryDelays(m)
	v.celeryControl(m)
	own := v.celeryQueues()
	switch {
	case m.certain:
		for _, q := range own {
			m.addQueue(q)
			m.addExchange(q.name)
		}
	case v.bound("celery", "celery", "celery"):
		m.because = `the queue "celery" is bound to an exchange of that name by that key`
		m.addQueue(v.queueOf["celery"])
		m.addExchange("celery")
	default:
		return nil
	}
	return []*match{m}
}

// celeryDelays adds delayed delivery, and the queues that it serves.
func (v *view) celeryDelays(m *match) {
	for _, l := range v.ladders {
		if _, ok := l.named("celery_delayed_"); !ok {
			continue
		}
		l.add(m)
		m.certain = true
		m.variant = "delayed delivery on " + l.levels[0].kind + " queues"
		m.because = fmt.Sprintf("the queues %s to %s are the %d levels of its delayed delivery", short(l.levels[0].name), short(l.levels[len(l.levels)-1].name), len(l.levels))
		exit := v.xOf[l.exit]
		if exit == nil || len(exit.outs) == 0 {
			m.cure = fmt.Sprintf("No exchange is bound to %s, so delayed tasks stay in the last level they pass. List the queue in task_queues, with a topic exchange: workers bind only queues that they know, and skip direct exchanges. ", short(l.exit)) + m.cure
			continue
		}
		m.cure = fmt.Sprintf("Give %s an alternate exchange with a queue, by a policy: otherwise tasks for a queue that is gone block a level for all others. On RabbitMQ before 4.0.1, use a Celery that has pull request 10095: a task that is retried twice runs into the broker's cycle detection. ", short(l.exit)) + m.cure
		for _, b := range exit.outs {
			if x := v.xOf[b.Exchange]; b.Exchange != "" && x != nil && !m.exchanges[x.name] {
				m.addExchange(x.name)
				for _, to := range x.outs {
					if to.Queue != "" {
						m.queues[to.Queue] = true
					}
				}
			}
		}
	}
}

// celeryControl adds the exchanges and queues of remote control and of events.
func (v *view) celeryControl(m *match) {
	_, events := v.xOf["celeryev"]
	for _, x := range v.exchanges {
		reply := v.xOf["reply."+x.name]
		if !strings.HasSuffix(x.name, ".pidbox") || x.kind != string(declare.ExchangeFanout) || reply == nil || !events && x.name != "celery.pidbox" {
			continue
		}
		m.certain = true
		if m.because == "" {
			m.because = fmt.Sprintf("%s and %s are the exchanges of its remote control", short(x.name), short(reply.name))
		}
		for _, of := range []*exchange{x, reply, v.xOf["celeryev"]} {
			if of == nil || m.exchanges[of.name] {
				continue
			}
			m.addExchange(of.name)
			for _, b := range of.outs {
				m.queues[b.Queue] = b.Queue != ""
			}
		}
	}
	delete(m.queues, "")
}

// celeryQueues are the queues as Celery declares one that it knows only the name of.
func (v *view) celeryQueues() (list []*queue) {
	for _, q := range v.free() {
		if v.isExchange(q.name, string(declare.ExchangeDirect)) && v.bound(q.name, q.name, q.name) && !q.deadLetters {
			list = append(list, q)
		}
	}
	return list
}
