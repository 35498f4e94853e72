package link

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"syscall"

	"github.com/hopback/hopback/internal/failure"
)

// addresses remembers the IP addresses that accepted a connection, but where no broker answered. A host name may
// have several addresses, such as that of a headless Service in Kubernetes, and Go connects to the first that
// accepts. So the next attempt skips those that have failed if there are others. A nil *addresses remembers none.
type addresses struct {
	mu     sync.Mutex
	failed []string // IP addresses with ports, guarded by mu; the last one failed last
}

// maxFailed bounds how many addresses are remembered: where nodes come and go, there may be any number.
const maxFailed = 64

// errPassedOver is the error for an address that is skipped.
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

// dial connects to host:port. It prefers an address that hasn't failed. If none of those accepts, it tries the
// failed ones again, unless fresh is set: first all but the one that failed last, so that they take turns.
func (a *addresses) dial(ctx context.Context, d net.Dialer, hostPort string, fresh bool) (net.Conn, error) {
	failed := a.snapshot()
	for {
		var mu sync.Mutex // the dialer may try IPv6 and IPv4 at once
		var passed []string
		skip := func(_ context.Context, _, address string, _ syscall.RawConn) error {
			if !slices.Contains(failed, address) {
				return nil
			}
			mu.Lock()
			defer mu.Unlock()
			passed = append(passed, address)
			return errPassedOver
		}
		if runtime.GOARCH != "wasm" { // Go's network there has one address for each host, and refuses to dial with a function
			d.ControlContext = skip
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

// again returns which of the skipped addresses to skip once more, after no other accepted: the one that failed last.
// It forgets the others. A single address isn't skipped again.
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

// atAddress reports whether another address of the host may work after err. It doesn't if the broker has refused
// something, because all nodes of a cluster refuse the same.
func atAddress(err error) bool {
	return errors.Is(err, failure.ErrUnreachable) || errors.Is(err, failure.ErrTLS)
}

// more reports whether to dial an endpoint once more after so many tries. err is the error of the last one. The
// host must have more addresses than that, and at least one that hasn't failed.
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
