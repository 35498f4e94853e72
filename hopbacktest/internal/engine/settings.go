package engine

// configure makes a queue's settings of its arguments and its policy.
func (q *queue) configure() {
	q.policy = q.vhost.policyFor(q)
	smaller := func(a, b int64) int64 { return min(a, b) }
	number := func(name string, both func(policy, arg int64) int64) int64 {
		v, _ := q.either(name, func(p, a any) any {
			pn, pok := p.(int64)
			an, aok := a.(int64)
			if pok && aok {
				return both(pn, an)
			}
			return p
		}).(int64)
		return v
	}
	optional := func(name string) int64 {
		if _, ok := q.either(name, func(p, _ any) any { return p }).(int64); !ok {
			return -1
		}
		return number(name, smaller)
	}
	policyFirst := func(p, _ any) any { return p }
	argFirst := func(_, a any) any { return a }

	s := settings{maxLength: optional("max-length"), maxBytes: optional("max-length-bytes"), expires: optional("expires"), ttl: optional("message-ttl")}
	overflow, _ := q.either("overflow", policyFirst).(string)
	if q.kind == typeClassic {
		overflow, _ = q.either("overflow", argFirst).(string)
	}
	s.rejectDead = overflow == "reject-publish-dlx" && q.kind == typeClassic
	s.reject = overflow == "reject-publish" || s.rejectDead
	s.limit = 20
	if _, ok := q.either("delivery-limit", policyFirst).(int64); ok {
		s.limit = number("delivery-limit", func(p, a int64) int64 {
			if p < 0 || a < 0 {
				return max(p, a)
			}
			return min(p, a)
		})
	}
	if s.limit < 0 {
		s.limit = -1
	}
	s.deadExchange, s.deadLetters = q.either("dead-letter-exchange", argFirst).(string)
	s.deadKey, s.hasDeadKey = q.either("dead-letter-routing-key", argFirst).(string)
	strategy, _ := q.either("dead-letter-strategy", argFirst).(string)
	s.atLeastOnce = q.quorum() && s.deadLetters && strategy == "at-least-once" && s.reject
	s.single, _ = q.either("single-active-consumer", argFirst).(bool)
	s.consumerTimeout = q.b.cfg.ConsumerTimeout.Milliseconds()
	if q.b.version.newer && q.quorum() {
		s.delayedRetry(q, number)
		if n := optional("consumer-timeout"); n >= 0 {
			s.consumerTimeout = n
		}
	}
	if n := optional("max-priority"); n > 0 && q.kind == typeClassic {
		s.maxPriority = int(min(n, 255))
	}
	was := q.settings
	q.settings = s
	if s.atLeastOnce != was.atLeastOnce || q.worker == nil {
		if q.worker != nil {
			q.worker.stop()
			q.worker.purge()
			q.worker = nil
		}
		if s.atLeastOnce {
			q.worker = &worker{q: q}
		}
	}
	if q.worker != nil && q.worker.armed {
		q.worker.again() // its dead letters may be routed differently now
	}
	q.wakeForExpiry()
	q.touch()
}

func (s *settings) delayedRetry(q *queue, number func(string, func(p, a int64) int64) int64) {
	kind, _ := q.either("delayed-retry-type", func(p, _ any) any { return p }).(string)
	smaller := func(a, b int64) int64 { return min(a, b) }
	s.retryMin, s.retryMax = number("delayed-retry-min", smaller), number("delayed-retry-max", smaller)
	if s.retryMin <= 0 {
		return
	}
	if s.retryMax <= 0 {
		s.retryMax = s.retryMin
	}
	switch kind {
	case "all":
		s.retry = retryAll
	case "failed":
		s.retry = retryFailed
	case "returned":
		s.retry = retryReturned
	}
}

// either is the value of a key of the policy or of the argument x-key, nil if it has
// neither. Of both, resolve chooses.
func (q *queue) either(key string, resolve func(policy, arg any) any) any {
	var p, a any
	if q.policy != nil {
		if arg, ok := q.policy.definition.get(key); ok {
			p = arg.value
		}
	}
	arg, ok := q.args.get("x-" + key)
	if ok {
		a = arg.value
	}
	switch {
	case p == nil:
		return a
	case a == nil:
		return p
	}
	return resolve(p, a)
}
