package link

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"

	"github.com/hopback/hopback/internal/failure"
)

// addresses holds the addresses behind host names at which a connection was made, and no broker
// answered. A name may have several, such as that of a headless Service in Kubernetes, and Go
// connects to the first that accepts. So the next attempt passes over those that have failed while
// there are others. A nil *addresses holds none.
type addresses struct {
	mu     sync.Mutex
	failed []string // IP address and port; the last one failed last
}

// maxFailed is how many addresses are held. Where nodes come and go, there may be any number.
const maxFailed = 64

// errPassedOver is why an address isn't dialed.
var errPassedOver = errors.New("no broker answered at this address before")

// fail notes that no broker answered at an address.
func (a *addresses) fail(at net.Addr, log *slog.Logger) {
	if a == nil || at == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.remove(at.String())
	if a.failed = append(a.failed, at.String()); len(a.failed) > maxFailed {
		a.failed = slices.Delete(a.failed, 0, 1)
	}
	if log != nil {
		log.Debug("hopback: no broker answered at this address; if the host has others, they are tried first", "address", at.String())
	}
}

// work notes that a broker answered at an address.
func (a *addresses) work(at net.Addr) {
	if a == nil || at == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.remove(at.String())
}

// remove is called with mu held.
func (a *addresses) remove(address string) {
	a.failed = slices.DeleteFunc(a.failed, func(s string) bool { return s == address })
}

func (a *addresses) snapshot() []string {
	if a == nil {
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.failed)
}

// dial connects to host:port, at an address that hasn't failed if there is one that accepts. Else
// those that failed get another chance, first all but the last one, so that they take turns; not if
// fresh is set.
func (a *addresses) dial(ctx context.Context, d net.Dialer, hostPort string, fresh bool) (net.Conn, error) {
	failed := a.snapshot()
	for {
		var mu sync.Mutex // the dialer may try IPv6 and IPv4 at once
		var passed []string
		d.ControlContext = func(_ context.Context, _, address string, _ syscall.RawConn) error {
			if !slices.Contains(failed, address) {
				return nil
			}
			mu.Lock()
			defer mu.Unlock()
			passed = append(passed, address)
			return errPassedOver
		}
		conn, err := d.DialContext(ctx, "tcp", hostPort)
		mu.Lock()
		over := slices.Clone(passed)
		mu.Unlock()
		if err == nil || len(over) == 0 || fresh || ctx.Err() != nil {
			return conn, err
		}
		failed = a.again(over)
	}
}

// again returns which of several addresses to pass over when no other accepts: the one that failed
// last. The others are forgotten. If there is one, it gets another chance itself.
func (a *addresses) again(passed []string) []string {
	if len(passed) < 2 {
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	last := ""
	for _, s := range slices.Clone(a.failed) {
		if slices.Contains(passed, s) {
			a.remove(last)
			last = s
		}
	}
	return []string{last}
}

// atAddress reports whether another address may do better: what was refused there is refused by all
// nodes of a cluster.
func atAddress(err error) bool {
	return errors.Is(err, failure.ErrUnreachable) || errors.Is(err, failure.ErrTLS)
}

// more reports whether to dial an endpoint once more, after tries of them. The last one failed with
// err. The host must have more addresses than that, and one that hasn't failed.
func (a *addresses) more(ctx context.Context, ep Endpoint, cfg DialConfig, tries int, err error) bool {
	failed := a.snapshot()
	if len(failed) == 0 || cfg.Dial != nil || !atAddress(err) {
		return false
	}
	if _, err := netip.ParseAddr(ep.host); err == nil {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, tcpTimeout)
	defer cancel()
	resolver := cfg.Resolver
	if resolver == nil {
		resolver = net.DefaultResolver
	}
	all, err := resolver.LookupHost(ctx, ep.host)
	if err != nil {
		return false
	}
	_, port, _ := net.SplitHostPort(ep.address)
	known := 0
	for _, ip := range all {
		if slices.Contains(failed, net.JoinHostPort(ip, port)) {
			known++
		}
	}
	return known > 0 && known < len(all) && tries < len(all)
}
