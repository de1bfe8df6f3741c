vcl 4.1;

# Varnish as a shared cache in front of the tests' origin server. The command fills in what stands between at signs, and
# sets what only parameters can say: nothing is kept unless the origin says so, what is too old is kept for a minute to
# be validated, and idle connections to the origin are closed before it closes them (5 s).

backend origin {
  .host = "@ORIGIN_HOST@";
  .port = "@ORIGIN_PORT@";
}

# What is too old is served only where the origin cannot be reached, and where it does not forbid that. Varnish asks it
# first; if that fails, it looks again with more grace, and does not ask a second time.
sub vcl_recv {
  if (req.restarts == 0) {
    set req.grace = 0s;
  }
}

sub vcl_backend_response {
  if (beresp.http.cache-control !~ "(?i)(must-revalidate|proxy-revalidate|no-cache|s-maxage)") {
    set beresp.grace = 30s;
  }
}

sub vcl_backend_error {
  set beresp.http.x-origin-failed = "1";
}

sub vcl_miss {
  if (req.restarts > 0) {
    return (synth(503));
  }
}

sub vcl_deliver {
  if (resp.http.x-origin-failed && req.restarts == 0 && req.method ~ "^(GET|HEAD)$") {
    set req.grace = 30s;
    return (restart);
  }
  unset resp.http.x-origin-failed;
}
