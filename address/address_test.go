package address_test

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/internal/brokername"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Every line was sent to live brokers, 4.0.5 and 4.3.6: a message came through.
func TestBuild(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		addr address.Address
		want string
	}{
		{address.Queue("orders"), "/queues/orders"},
		{address.Queue("a.b..c"), "/queues/a.b..c"},
		{address.Queue("a b"), "/queues/a%20b"},
		{address.Queue("a/b"), "/queues/a%2Fb"},
		{address.Queue("a%b"), "/queues/a%25b"},
		{address.Queue("a%2Fb"), "/queues/a%252Fb"},
		{address.Queue("a+b"), "/queues/a%2Bb"},
		{address.Queue("a?b#c"), "/queues/a%3Fb%23c"},
		{address.Queue("a;b=c&d:e@f"), "/queues/a%3Bb%3Dc%26d%3Ae%40f"},
		{address.Queue("tab\t"), "/queues/tab%09"},
		{address.Queue(`q"uote'`), "/queues/q%22uote%27"},
		{address.Queue("ünï日本🙂"), "/queues/%C3%BCn%C3%AF%E6%97%A5%E6%9C%AC%F0%9F%99%82"},
		{address.Queue("e\u0301"), "/queues/e%CC%81"},
		{address.Queue("a*b"), "/queues/a%2Ab"},
		{address.Queue("nul\x00"), "/queues/nul%00"},
		{address.Queue("ctl\x01\x7f"), "/queues/ctl%01%7F"},
		{address.Queue("-._~09azAZ"), "/queues/-._~09azAZ"},
		{address.Queue("."), "/queues/."},
		{address.Queue(".."), "/queues/.."},
		{address.Queue(strings.Repeat("q", brokername.Max)), "/queues/" + strings.Repeat("q", 255)},
		{address.Exchange("shop", "order.placed"), "/exchanges/shop/order.placed"},
		{address.Exchange("shop", ""), "/exchanges/shop"},
		{address.Exchange("a/b", "c/d"), "/exchanges/a%2Fb/c%2Fd"},
		{address.Exchange("amq.topic", "a b"), "/exchanges/amq.topic/a%20b"},
		{address.Exchange("shop", "\r\n"), "/exchanges/shop/%0D%0A"},
		{address.Exchange("shop", "."), "/exchanges/shop/."},
		{address.Exchange("shop", strings.Repeat("k", brokername.MaxKey)), "/exchanges/shop/" + strings.Repeat("k", 4096)},
	} {
		got, err := tt.addr.Build()
		require.NoError(t, err, "%q", tt.want)
		assert.Equal(t, tt.want, got)
		assert.Equal(t, tt.want, tt.addr.String())
		back, err := address.Parse(got)
		require.NoError(t, err, "%q", tt.want)
		assert.Equal(t, tt.addr, back)
	}
}

func TestBuildRefuses(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		addr address.Address
		arg  string
		says string
	}{
		"zero":                 {address.Address{}, "address", "names nothing"},
		"empty queue":          {address.Queue(""), "queue name", "is empty"},
		"empty exchange":       {address.Exchange("", "key"), "exchange name", "address.Queue"},
		"default exchange":     {address.Exchange("amq.default", "key"), "exchange name", "address.Queue"},
		"long queue":           {address.Queue(strings.Repeat("q", 256)), "queue name", "256 bytes"},
		"long in bytes":        {address.Queue(strings.Repeat("é", 128)), "queue name", "256 bytes"},
		"long exchange":        {address.Exchange(strings.Repeat("q", 256), ""), "exchange name", "256 bytes"},
		"long key":             {address.Exchange("x", strings.Repeat("k", 4097)), "routing key", "4097 bytes"},
		"queue not UTF-8":      {address.Queue("\xff"), "queue name", "UTF-8"},
		"cut rune":             {address.Queue("a\xc3"), "queue name", "UTF-8"},
		"surrogate":            {address.Queue("\xed\xa0\x80"), "queue name", "UTF-8"},
		"exchange not UTF-8":   {address.Exchange("\xff", ""), "exchange name", "UTF-8"},
		"key not UTF-8":        {address.Exchange("x", "\xff"), "routing key", "UTF-8"},
		"carriage return":      {address.Queue("a\r"), "queue name", "line break"},
		"line feed":            {address.Queue("a\nb"), "queue name", "line break"},
		"exchange line feed":   {address.Exchange("a\nb", ""), "exchange name", "line break"},
		"zero with everything": {address.Exchange("\xff\n"+strings.Repeat("x", 1<<16), "\xff"), "exchange name", "bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, err := tt.addr.Build()
			assert.Empty(t, s)
			refused(t, err, tt.arg, tt.says)
			assert.Equal(t, err, tt.addr.Validate())
			shown := tt.addr.String()
			assert.NotEmpty(t, shown)
			assert.True(t, utf8.ValidString(shown) && !strings.ContainsAny(shown, "\r\n"), "%q", shown)
		})
	}
}

func refused(t *testing.T, err error, arg, says string) {
	t.Helper()
	var e *argument.Error
	require.ErrorAs(t, err, &e)
	assert.Equal(t, arg, e.Path.String())
	assert.Contains(t, e.Error(), says)
	assert.NotEmpty(t, e.Remedy)
	assert.Less(t, len(e.Error()), 700, "a huge value doesn't flood a log")
}

func TestParse(t *testing.T) {
	t.Parallel()
	for s, want := range map[string]address.Address{
		"/queues/%61%2fb":              address.Queue("a/b"),
		"/queues/a+b":                  address.Queue("a+b"),
		"/queues/!$&'()*+,;=:@":        address.Queue("!$&'()*+,;=:@"),
		"/exchanges/shop/":             address.Exchange("shop", ""),
		"/exchanges/shop/a.%23":        address.Exchange("shop", "a.#"),
		"/exchanges/amq.direct/%2F%25": address.Exchange("amq.direct", "/%"),
	} {
		got, err := address.Parse(s)
		require.NoError(t, err, s)
		assert.Equal(t, want, got, s)
	}
}

func TestParseRefuses(t *testing.T) {
	t.Parallel()
	for s, says := range map[string]string{
		"":                                    "is empty",
		"/":                                   "neither",
		"/queues":                             "neither",
		"/queues/":                            "is empty",
		"/Queues/a":                           "neither",
		"/queues/a/b":                         "%2F",
		"/queues//a":                          "%2F",
		"/queues/a/":                          "%2F",
		"/queues/%":                           "percent",
		"/queues/%2":                          "percent",
		"/queues/%zz":                         "percent",
		"/queues/%g0":                         "percent",
		"/queues/%0g":                         "percent",
		"/queues/a b":                         "%20",
		"/queues/é":                           "%C3",
		"/queues/a?b":                         "%3F",
		"/queues/a#b":                         "%23",
		"/queues/a\nb":                        "%0A",
		"/queues/a%0Ab":                       "line break",
		"/queues/%FF":                         "UTF-8",
		"/exchanges":                          "neither",
		"/exchanges/":                         "address.Queue",
		"/exchanges//key":                     "address.Queue",
		"/exchanges/amq.default/q":            "address.Queue",
		"/exchanges/a/b/c":                    "%2F",
		"/exchanges/a//":                      "%2F",
		"/exchanges/%/b":                      "percent",
		"/exchanges/a/%":                      "percent",
		"/exchanges/%FF/b":                    "UTF-8",
		"/exchanges/a/%FF":                    "UTF-8",
		"/queue/orders":                       "v1",
		"/amq/queue/orders":                   "v1",
		"/exchange/shop/key":                  "/exchanges/<exchange>",
		"/topic/order.placed":                 "amq.topic",
		"orders":                              "address.Queue",
		"amqp://host/queues/orders":           "v1",
		"\xff\x00":                            "v1",
		"/queues/" + strings.Repeat("q", 256): "256 bytes",
	} {
		got, err := address.Parse(s)
		assert.True(t, got.IsZero(), s)
		var e *argument.Error
		require.ErrorAs(t, err, &e, s)
		assert.Contains(t, e.Error(), says, s)
		assert.NotEmpty(t, e.Remedy, s)
	}
}

func TestAccessors(t *testing.T) {
	t.Parallel()
	q, x := address.Queue("orders"), address.Exchange("shop", "key")
	var zero address.Address
	assert.True(t, zero.IsZero() && !q.IsZero() && !x.IsZero())
	assert.False(t, address.Queue("").IsZero(), "an empty name is a mistake, not an absence")
	assert.True(t, q.IsQueue() && !x.IsQueue() && !zero.IsQueue())
	assert.True(t, x.IsExchange() && !q.IsExchange() && !zero.IsExchange())
	assert.Equal(t, "orders", q.QueueName())
	assert.Empty(t, x.QueueName()+zero.QueueName())
	assert.Equal(t, "shop", x.ExchangeName())
	assert.Empty(t, q.ExchangeName()+zero.ExchangeName())
	assert.Equal(t, "key", x.RoutingKey())
	assert.Empty(t, q.RoutingKey())
	assert.Equal(t, "(no address)", zero.String())
}

func TestAddressIsAKey(t *testing.T) {
	t.Parallel()
	m := map[address.Address]int{address.Queue("a"): 1, address.Exchange("a", ""): 2, address.Exchange("a", "b"): 3}
	assert.Equal(t, 1, m[address.Queue("a")])
	assert.Equal(t, 2, m[address.Exchange("a", "")])
	parsed, err := address.Parse("/exchanges/%61/%62")
	require.NoError(t, err)
	assert.Equal(t, 3, m[parsed], "two spellings of one address are equal")
}

// unreservedOnly is what may stand in a part that Build has made.
func unreservedOnly(part string) bool {
	return strings.Trim(part, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~%") == ""
}

func FuzzBuildParse(f *testing.F) {
	f.Add("orders", "")
	f.Add("a/b", "%2F+ ")
	f.Add("\xff", "\x00\r\n")
	f.Add("", "é")
	f.Add("amq.default", ".")
	f.Fuzz(func(t *testing.T, name, key string) {
		for _, a := range []address.Address{address.Queue(name), address.Exchange(name, key)} {
			s, err := a.Build()
			if err != nil {
				var e *argument.Error
				require.ErrorAs(t, err, &e)
				require.True(t, utf8.ValidString(err.Error()))
				_, err = address.Parse(a.String())
				require.Error(t, err, "what Build refuses, Parse refuses")
				continue
			}
			for _, part := range strings.Split(s, "/") {
				require.True(t, unreservedOnly(part), s)
			}
			back, err := address.Parse(s)
			require.NoError(t, err)
			require.Equal(t, a, back)
		}
	})
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{"/queues/a%2Fb", "/exchanges/a/b", "/exchanges/a/", "/queues/%", "/exchanges//", "/queue/a", "", "\xff"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		a, err := address.Parse(s)
		if err != nil {
			var e *argument.Error
			require.ErrorAs(t, err, &e)
			require.True(t, a.IsZero())
			return
		}
		built, err := a.Build()
		require.NoError(t, err, "what Parse accepts, Build accepts")
		again, err := address.Parse(built)
		require.NoError(t, err)
		require.Equal(t, a, again)
	})
}
