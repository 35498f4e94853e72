package rabbitmq

import (
	"context"
	"encoding/base64"
	"fmt"
)

// Eval evaluates Erlang expressions on the broker, as rabbitmqctl eval does, and
// returns the last one's value as Erlang prints it:
//
//	b.Eval(ctx, "application:get_env(rabbit, vm_memory_high_watermark).")
//
// The error says what is wrong with an expression that can't be parsed, or fails.
// rabbitmqctl starts an Erlang VM, which takes seconds of CPU; this takes a tenth
// of one where there is Erlang's erl_call, as in Debian's packages.
func (b *Broker) Eval(ctx context.Context, expressions string) (out []byte, err error) {
	err = b.do("eval", func(d driver, s *state) (err error) {
		out, err = d.exec(ctx, s, evalCommand(expressions))
		return err
	})
	return out, err
}

// EnablePlugin does what rabbitmq-plugins enable does on a broker that runs. Not for
// two plugins at once, which would write the same file. A broker serves a little before
// it takes itself for started, and enables nothing until then.
func (b *Broker) EnablePlugin(ctx context.Context, name string) error {
	_, err := b.Eval(ctx, fmt.Sprintf(`ok = rabbit:await_startup(), File = rabbit_plugins:enabled_plugins_file(),
ok = rabbit_file:write_term_file(File, [lists:usort(['%s' | rabbit_plugins:read_enabled(File)])]),
{ok, _, _} = rabbit_plugins:ensure(File).`, name))
	return err
}

// evalScript gets the expressions, and those for erl_call. That tells by what it
// prints last, not by its exit status, whether these failed.
const evalScript = `command -v erl_call >/dev/null || exec rabbitmqctl -q eval "$1"
cookie=$(printf %s "$RABBITMQ_CTL_ERL_ARGS" | sed -n 's/.*-setcookie *\([^ ]*\).*/\1/p')
out=$(printf '%s\n' "$2" | erl_call -R -sname "${RABBITMQ_NODENAME:-rabbit@$(hostname)}" ${cookie:+-c "$cookie"} -fetch_stdout -e) || exit
case $out in
*'{ok, ok}') printf %s "${out%'{ok, ok}'}" ;;
*) printf '%s\n' "$out" >&2; exit 1 ;;
esac`

// evalCommand hands over the expressions in base64, as erl_call takes bytes for
// characters.
func evalCommand(expressions string) []string {
	return []string{"sh", "-c", evalScript, "eval", expressions, fmt.Sprintf(
		`{ok, Tokens, _} = erl_scan:string(unicode:characters_to_list(base64:decode("%s"))), {ok, Parsed} = erl_parse:parse_exprs(Tokens), {value, Value, _} = erl_eval:exprs(Parsed, []), io:format("~tp~n", [Value]).`,
		base64.StdEncoding.EncodeToString([]byte(expressions)))}
}
