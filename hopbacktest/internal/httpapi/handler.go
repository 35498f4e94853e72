// Package httpapi is RabbitMQ's management HTTP API of a broker in memory, as far as
// hopback and its tests use it: virtual hosts, users, permissions, limits, queues,
// exchanges, bindings, policies, definitions, connections, nodes and health checks.
package httpapi

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/hopback/hopback/hopbacktest/internal/engine"
)

// maxBody is the largest request in bytes.
const maxBody = 16 << 20

// New returns the API of b. Its paths begin with /api.
func New(b *engine.Broker) http.Handler {
	a := &api{b: b, mux: http.NewServeMux()}
	a.vhosts()
	a.users()
	a.policies()
	a.queues()
	a.exchanges()
	a.bindings()
	a.definitions()
	a.status()
	a.mux.HandleFunc("/api/", func(w http.ResponseWriter, r *http.Request) {
		write(w, r, unmodeled(r.Method+" for this path of RabbitMQ's HTTP API"))
	})
	// A ServeMux takes a segment of %2F, the virtual host "/", for the end of a path. So it
	// gets paths as they are escaped, and value unescapes what it finds.
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.Contains(r.URL.EscapedPath(), "//") { // a ServeMux would redirect
			write(w, r, missing)
			return
		}
		escaped := *r
		to := *r.URL
		// RabbitMQ puts up with one slash at the end.
		to.Path, to.RawPath = strings.TrimSuffix(r.URL.EscapedPath(), "/"), ""
		escaped.URL = &to
		a.mux.ServeHTTP(w, &escaped)
	})
}

type api struct {
	b   *engine.Broker
	mux *http.ServeMux
}

// level is what a user has to be.
type level string

const (
	levelManagement    level = "management"
	levelPolicymaker   level = "policymaker"
	levelMonitoring    level = "monitoring"
	levelAdministrator level = "administrator"
)

// allows says whether a user with these tags is as much.
func (l level) allows(tags []string) bool {
	has := func(tag level) bool { return slices.Contains(tags, string(tag)) }
	switch l {
	case levelAdministrator:
		return has(levelAdministrator)
	case levelPolicymaker:
		return has(levelAdministrator) || has(levelPolicymaker)
	case levelMonitoring:
		return has(levelAdministrator) || has(levelMonitoring)
	}
	return has(levelManagement) || has(levelPolicymaker) || has(levelMonitoring) || has(levelAdministrator)
}

// call is a request that is allowed.
type call struct {
	*http.Request
	body []byte
	user engine.UserInfo
}

// value is a part of the path.
func (c *call) value(name string) string {
	v, err := url.PathUnescape(c.PathValue(name))
	if err != nil {
		return c.PathValue(name)
	}
	return v
}

func (c *call) vhost() string { return c.value("vhost") }
func (c *call) name() string  { return c.value("name") }

// read decodes the request's body. An empty one is an empty object.
func (c *call) read(into any) error {
	if len(c.body) == 0 {
		return nil
	}
	return json.Unmarshal(c.body, into)
}

// reply is a status and what is encoded as the body, if it isn't nil.
type reply struct {
	status   int
	body     any
	location string
}

func ok(body any) reply { return reply{status: http.StatusOK, body: body} }

// made is 201 or 204.
func made(is bool) reply {
	if is {
		return reply{status: http.StatusCreated}
	}
	return reply{status: http.StatusNoContent}
}

type problem struct {
	Error  string `json:"error"`
	Reason string `json:"reason"`
}

func bad(reason string) reply {
	return reply{status: http.StatusBadRequest, body: problem{"bad_request", reason}}
}

// unmodeled refuses what RabbitMQ has and this broker doesn't: any other answer could be a
// wrong one.
func unmodeled(what string) reply {
	return reply{status: http.StatusNotImplemented, body: problem{"not_implemented", "hopbacktest doesn't have " + what}}
}

var missing = reply{status: http.StatusNotFound, body: problem{"Object Not Found", "Not Found"}}

// failed is the reply to an error of the engine, or of a body.
func failed(err error) reply {
	if errors.Is(err, engine.ErrMissing) {
		return missing
	}
	return bad(err.Error())
}

// handle adds a route. A virtual host in its path has to exist, and the user to have
// a permission there.
func (a *api) handle(pattern string, least level, do func(*call) reply) {
	a.route(pattern, least, []string{"page", "page_size", "name", "use_regex", "sort", "sort_reverse"}, do)
}

// listing adds a route to a list. Its query may ask for a single page.
func (a *api) listing(pattern string, least level, all func(*call) []object) {
	a.route(pattern, least, []string{"name", "use_regex", "sort", "sort_reverse"}, func(c *call) reply {
		if !c.URL.Query().Has("page") {
			return ok(all(c))
		}
		return paged(all(c), c.URL.Query())
	})
}

// paged is the page of a list that a query asks for.
func paged(all []object, query url.Values) reply {
	page, err := strconv.Atoi(query.Get("page"))
	size, asked := 100, "undefined"
	if err == nil && query.Has("page_size") {
		asked = query.Get("page_size")
		size, err = strconv.Atoi(asked)
	}
	switch {
	case err != nil:
		return bad("Pagination parameters are invalid")
	case page < 1 || size < 1 || size > maxPage:
		return reply{status: http.StatusBadRequest, body: problem{"invalid_pagination_parameters", fmt.Sprintf("Invalid pagination parameters: page number %d, page size %s", page, asked)}}
	}
	pages := (len(all) + size - 1) / size
	if page > max(pages, 1) {
		return reply{status: http.StatusBadRequest, body: problem{"page_out_of_range", fmt.Sprintf("Page out of range, page: %d page size: %d, len: %d", page, size, len(all))}}
	}
	items := all[(page-1)*size : min(page*size, len(all))]
	return ok(object{
		"items": items, "item_count": len(items), "filtered_count": len(all), "total_count": len(all),
		"page": page, "page_count": pages, "page_size": size,
	})
}

// maxPage is the largest page.
const maxPage = 500

// route is handle without the parameters that the route doesn't have.
func (a *api) route(pattern string, least level, lacks []string, do func(*call) reply) {
	method, path, _ := strings.Cut(pattern, " ")
	a.mux.HandleFunc(method+" /api"+path, func(w http.ResponseWriter, r *http.Request) {
		user, refused := a.login(r, least)
		if refused != nil {
			w.Header().Set("WWW-Authenticate", `Basic realm="RabbitMQ Management"`)
			write(w, r, *refused)
			return
		}
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
		if err != nil {
			write(w, r, bad(err.Error()))
			return
		}
		query := r.URL.Query()
		for _, name := range lacks {
			if query.Has(name) {
				write(w, r, unmodeled("the query parameter "+name))
				return
			}
		}
		c := &call{r, body, user}
		// The paths that make a virtual host or permissions in one are for administrators.
		if c.vhost() != "" && least != levelAdministrator {
			if !slices.ContainsFunc(a.b.VHosts(), func(v engine.VHostInfo) bool { return v.Name == c.vhost() }) {
				write(w, r, missing)
				return
			}
			if _, may := user.Permissions[c.vhost()]; !may && !levelAdministrator.allows(user.Tags) {
				write(w, r, *unauthorized("User not authorised to access virtual host"))
				return
			}
		}
		write(w, r, do(c))
	})
}

func unauthorized(reason string) *reply {
	return &reply{status: http.StatusUnauthorized, body: problem{"not_authorized", reason}}
}

func (a *api) login(r *http.Request, least level) (engine.UserInfo, *reply) {
	name, password, _ := r.BasicAuth()
	if _, err := a.b.Authenticate("PLAIN", name, password); err != nil {
		return engine.UserInfo{}, unauthorized("Not_Authorized")
	}
	for _, u := range a.b.Users() {
		if u.Name == name {
			if !least.allows(u.Tags) {
				return u, unauthorized("Not " + string(least) + " user")
			}
			return u, nil
		}
	}
	return engine.UserInfo{}, unauthorized("Not_Authorized")
}

func write(w http.ResponseWriter, r *http.Request, to reply) {
	if to.location != "" {
		w.Header().Set("Location", to.location)
	}
	if to.body == nil {
		w.WriteHeader(to.status)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(to.status)
	body := to.body
	if columns := r.URL.Query().Get("columns"); columns != "" && to.status == http.StatusOK {
		body = selected(body, strings.Split(columns, ","))
	}
	_ = json.NewEncoder(w).Encode(body)
}

// selected leaves only the columns that are asked for.
func selected(body any, columns []string) any {
	text, err := json.Marshal(body)
	if err != nil {
		return body
	}
	var v any
	if json.Unmarshal(text, &v) != nil {
		return body
	}
	each := func(list []any) {
		for i := range list {
			if m, ok := list[i].(map[string]any); ok {
				list[i] = only(m, columns)
			}
		}
	}
	switch v := v.(type) {
	case []any:
		each(v)
	case map[string]any:
		items, isPage := v["items"].([]any)
		if !isPage {
			return only(v, columns)
		}
		each(items)
	}
	return v
}

// only leaves the columns of one object. A dot leads into an object within.
func only(m map[string]any, columns []string) map[string]any {
	out := map[string]any{}
	for _, c := range columns {
		from, to := m, out
		path := strings.Split(c, ".")
		for _, name := range path[:len(path)-1] {
			inner, ok := from[name].(map[string]any)
			if !ok {
				from = nil
				break
			}
			next, ok := to[name].(map[string]any)
			if !ok {
				next = map[string]any{}
				to[name] = next
			}
			from, to = inner, next
		}
		if value, ok := from[path[len(path)-1]]; ok {
			to[path[len(path)-1]] = value
		}
	}
	return out
}

// object is JSON's.
type object = map[string]any

// list encodes each, and an empty list rather than null.
func list[T any](all []T, encode func(T) object) []object {
	out := make([]object, 0, len(all))
	for _, v := range all {
		out = append(out, encode(v))
	}
	return out
}
