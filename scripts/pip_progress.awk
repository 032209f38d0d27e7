# What pip says, made short: that it goes on, and what is large. `make` pipes pip through this while it installs.
function say(text) { printf "  %s\n", text; fflush() }
/^Collecting / { found++; if (found % 25 == 0) say(found " packages found") }
/(Downloading|Using cached) .*\([0-9.]+ [MG]B\)/ {
    size = $NF == "MB)" || $NF == "GB)" ? $(NF - 1) $NF : $0
    name = $2 == "cached" ? $3 : $2
    sub(/.*\//, "", name)
    sub(/-(cp|py|pp|manylinux).*/, "", name)
    gsub(/[()]/, "", size)
    if (size + 0 >= 20 || size ~ /GB/) say(name " (" size ")")
}
/^Installing collected packages: / { say("unpacking " split($0, all, ",") " packages") }
/^Successfully installed/ { say("installed") }
