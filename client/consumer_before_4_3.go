package client

import "fmt"

// resumed keeps a delivery while the consumer is paused, where its return would count. It
// returns false if the delivery is to go back all the same, because the consumer drains, and
// lost if the link has ended.
func (rs *results) resumed(resume <-chan struct{}) (begin, lost bool) {
	select {
	case <-resume:
		return true, false
	case <-rs.deliveries.dead:
		return false, true
	case <-rs.deliveries.closing:
		return false, false
	}
}

// mayHaveLost is why a session is replaced after the queue's leader has moved.
func mayHaveLost(was, leader string) error {
	return fmt.Errorf("the queue's leader has moved from %s to %s: RabbitMQ below 4.3 may have lost settlements", was, leader)
}
