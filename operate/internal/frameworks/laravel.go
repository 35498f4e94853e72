package frameworks

import (
	"fmt"
	"strconv"
	"strings"
)

const laravelCure = "Set reroute_failed and a failed_exchange, with one try for each job: a job that fails is then rejected, and the central retrier delays it. "

// laravel recognizes vladimir-yuldashev/laravel-queue-rabbitmq (src/Queue/RabbitMQQueue.php,
// version 14):
//
//	<queue>               queue   with reroute_failed, dead-letters with the key <queue>.failed
//	<queue>.delay.<ms>    queue   expires after twice its time to live, dead-letters to <queue>
func (v *view) laravel() []*match {
	m := newMatch()
	m.central, m.cure = true, laravelCure
	for _, q := range v.free() {
		at := strings.LastIndex(q.name, ".delay.")
		if at < 0 || !q.delays() || !q.hasDeadKey || q.name[at+len(".delay."):] != strconv.FormatInt(q.ttl, 10) {
			continue
		}
		m.certain = m.certain || q.expires == 2*q.ttl
		if m.because == "" {
			m.because = fmt.Sprintf("the delay queue %s is named by its time to live, and dead-letters to %s", short(q.name), short(q.deadKey))
		}
		m.addQueue(q)
		m.addExchange(q.deadTo)
		m.queues[q.name[:at]] = true
		if q.kind != "classic" {
			m.cure = laravelCure + "Its delay queues must be classic: declaring a quorum queue again doesn't renew its lease, so it is deleted with the jobs in it. Set the virtual host's default queue type to classic, and ask for quorum queues in the configuration. "
		}
	}
	for _, q := range v.free() {
		if q.deadKey != q.name+".failed" || !q.deadLetters {
			continue
		}
		if m.because == "" {
			m.because = fmt.Sprintf("the queue %s dead-letters with the key %s", short(q.name), short(q.deadKey))
		}
		m.addQueue(q)
		m.addExchange(q.deadTo)
		m.queues[q.deadKey] = true
		if q.deadTo == "" && v.queueOf[q.deadKey] == nil {
			m.cure = fmt.Sprintf("Declare the queue %s: the driver doesn't, so jobs that fail are lost. ", short(q.deadKey)) + m.cure
		}
	}
	if m.because == "" {
		return nil
	}
	m.cure = strings.TrimSpace(m.cure)
	return []*match{m}
}
