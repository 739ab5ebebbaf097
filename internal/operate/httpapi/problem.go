package httpapi

import (
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"sync"

	"github.com/danielgtaylor/huma/v2"

	"github.com/outrelay/outrelay/internal/base/logging"
	"github.com/outrelay/outrelay/internal/operate/admin"
)

// ErrorBody is the body of an error response (RFC 9457). It never quotes values of the request, which
// may contain a payload or a secret.
type ErrorBody struct {
	Type   string         `json:"type,omitempty" doc:"The kind of problem: about:blank or urn:outrelay:<kind>."`
	Title  string         `json:"title" doc:"The text of the HTTP status."`
	Status int            `json:"status" doc:"The HTTP status."`
	Detail string         `json:"detail" doc:"The problem with this request."`
	Fix    string         `json:"fix,omitempty" doc:"What to do."`
	Errors []ProblemPlace `json:"errors,omitempty" doc:"The invalid values of the request."`
	Done   int64          `json:"done,omitempty" doc:"Entries that an action processed before it failed. They stay as they are now, and the same request does the rest."`
}

// ProblemPlace is one invalid value of a request.
type ProblemPlace struct {
	Location string `json:"location,omitempty" doc:"Its location, such as body.filter.class or query.limit."`
	Message  string `json:"message" doc:"The problem with the field."`
}

func (p *ErrorBody) Error() string { return p.Detail }

// GetStatus returns the HTTP status.
func (p *ErrorBody) GetStatus() int { return p.Status }

// ContentType returns the media type of problems.
func (p *ErrorBody) ContentType(string) string { return "application/problem+json" }

// replaceLibraryErrors sets the format of the library's own errors, for which it has only a variable.
var replaceLibraryErrors = sync.OnceFunc(func() { huma.NewError = newLibraryProblem })

// newLibraryProblem converts an error of the library to a problem, without the values that it quotes.
func newLibraryProblem(status int, detail string, errs ...error) huma.StatusError {
	// A message of the library may quote the value of a request, which may be a secret.
	problem := newProblem(status, logging.Clean(detail), "")
	for _, err := range errs {
		if err == nil {
			continue
		}

		var place huma.ErrorDetailer
		if errors.As(err, &place) {
			errorDetail := place.ErrorDetail()
			problem.Errors = append(problem.Errors, ProblemPlace{errorDetail.Location, logging.Clean(errorDetail.Message)})
		} else {
			problem.Errors = append(problem.Errors, ProblemPlace{Message: logging.Clean(err.Error())})
		}
	}

	switch status {
	case http.StatusUnprocessableEntity, http.StatusBadRequest:
		problem.Fix = "correct the listed values; /api/openapi.json describes the allowed ones"
	case http.StatusRequestEntityTooLarge:
		problem.Fix = "send less in one request"
	}
	return problem
}

// newProblem returns a problem that the API itself found.
func newProblem(status int, detail, fix string) *ErrorBody {
	return &ErrorBody{Title: http.StatusText(status), Status: status, Detail: detail, Fix: fix}
}

var statusOf = map[admin.Failure]int{
	admin.FailInvalid:     http.StatusUnprocessableEntity,
	admin.FailNotFound:    http.StatusNotFound,
	admin.FailConflict:    http.StatusConflict,
	admin.FailChanged:     http.StatusPreconditionFailed,
	admin.FailForbidden:   http.StatusFailedDependency,
	admin.FailUnavailable: http.StatusServiceUnavailable,
}

// problemOf converts an error of a use-case to a problem. It returns nil for nil.
func problemOf(err error) error {
	if err == nil {
		return nil
	}
	var problem huma.StatusError
	if errors.As(err, &problem) {
		return problem
	}

	kind, fix := admin.Explain(err)
	described := newProblem(statusOf[kind], logging.Clean(strings.ToValidUTF8(err.Error(), "\uFFFD")), fix)
	described.Type = "urn:outrelay:" + string(kind)
	return described
}

// writeProblem responds outside of the API. A browser that opens a page gets text.
func writeProblem(response http.ResponseWriter, request *http.Request, status int, detail, fix string) {
	// The errors of writing are ignored: the client is gone.
	if !isAPI(request) && strings.Contains(request.Header.Get("Accept"), "text/html") {
		response.Header().Set("Content-Type", "text/plain; charset=utf-8")
		response.WriteHeader(status)
		_, _ = response.Write([]byte(http.StatusText(status) + ": " + detail + "\n" + fix + "\n"))
		return
	}

	response.Header().Set("Content-Type", "application/problem+json")
	response.WriteHeader(status)
	_ = json.NewEncoder(response).Encode(newProblem(status, detail, fix))
}
