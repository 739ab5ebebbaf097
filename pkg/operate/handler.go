package operate

import (
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/operate/httpapi"
	"github.com/outrelay/outrelay/internal/operate/operators"
)

// Role is the rights of a caller of the mounted page and API.
type Role string

// The roles.
const (
	Viewer Role = admin.RoleViewer   // may read
	Actor  Role = admin.RoleOperator // may read and act
)

// Caller is the person or program that sent a request to the mounted page or API.
type Caller struct {
	// Name is the actor in the audit log: at most 128 bytes of printable text. Required.
	Name string
	// Role is required.
	Role Role
	// Payloads permits to read payloads of events and the state of sagas.
	Payloads bool
}

// requestRate is how many requests per second one caller may send if the service authorizes callers. A page that is open sends
// about one.
const requestRate = 50

// Handler returns the operators' page, and the API below /api/v1, for the mux of a service:
//
//	handler, err := operator.Handler("/outrelay", authorize)
//	mux.Handle("/outrelay/", handler)
//
// prefix is the path at which clients reach the handler, or "" for the root. Every link and redirect begins with it. The
// handler accepts paths with and without it, so a proxy or http.StripPrefix may remove it. Do not choose the path of a page,
// such as /dead.
//
// authorize returns the caller of a request, for example from the session of the service. Its error is the reason why the
// request is rejected, with status 403, and the client sees it. If authorize is nil, people log in as the relay's
// http.admin is configured: with its tokens, or by its proxy. Handler returns an error if both are missing, because everybody could
// then act.
//
// Requests pass the same checks as in `outrelay run`: pages of other origins are rejected, and the rate and the number of
// requests of each caller are limited. Run [Operator.Run] while the handler is mounted.
func (o *Operator) Handler(prefix string, authorize func(*http.Request) (Caller, error)) (http.Handler, error) {
	if prefix != "" && !config.IsPrefix(prefix) {
		return nil, fmt.Errorf("operate: prefix %s: %s: %w", strconv.Quote(prefix), config.PrefixRule, ErrInvalid)
	}

	access := httpapi.Access{Rate: requestRate}
	switch {
	case authorize != nil:
		access.Identify = func(request *http.Request) (admin.Caller, error) {
			caller, err := authorize(request)
			return admin.Caller{Actor: admin.Actor{Name: strings.TrimSpace(caller.Name)}, Role: string(caller.Role), Payloads: caller.Payloads}, err
		}
	case o.canLogIn():
		access = operators.AccessOf(o.admin)
	default:
		return nil, errors.New("operate: the page has no login: pass a function that authorizes callers, or set " +
			"http.admin of the relay to { listen: off, token: … }")
	}

	return operators.NewHandler(o.use.For(admin.Actor{}), prefix, access), nil
}

// canLogIn reports whether the configuration of the relay says who may use the page.
func (o *Operator) canLogIn() bool {
	access := o.admin
	return access != nil && (!access.Token.IsZero() || !access.ViewerToken.IsZero() || access.Proxy != nil)
}
